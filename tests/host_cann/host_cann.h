/* What libascendcl of the stand-in offers to libopapi and libhccl of the stand-in, and to tests through ctypes.
 *
 * Streams are asynchronous. Each has a worker thread that runs its tasks first in, first out; a random delay may come before each.
 * A stream argument is an aclrtStream of this library; NULL is the default stream of the calling thread's device.
 */
#ifndef HOST_CANN_H
#define HOST_CANN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- for libopapi and libhccl --------------------------------------------------------------------------------------- */

/* A task: what a stream's worker runs. 0 is success; anything else is an acl error code, whose text the task gives to
 * host_cann_set_error before it returns. `argument` belongs to the task, which frees it. */
typedef int (*host_cann_task)(void* argument);

/* Puts a task at the end of the stream's queue and returns at once. The task runs in the stream's worker thread, after the tasks
 * before it. Its error, if any, stays with the stream until a synchronize of the stream or of its device returns it; the first
 * error is the one that stays. Returns 0, or an acl error code if the stream is none. A task must not drain or synchronize its own
 * stream. */
int host_cann_enqueue(void* stream, host_cann_task run, void* argument);

/* Waits until all tasks that were in the stream's queue at the call are done. Returns 0 or the error that stays with the stream,
 * which it leaves there. A caller that holds Python's lock must let go of it: tasks may need it. */
int host_cann_drain(void* stream);

/* Text for this thread's next aclGetRecentErrMsg. In a task: the text of the task's error. */
void host_cann_set_error(const char* text);

/* --- operators whose results come late (late.c) ----------------------------------------------------------------------- */

#define HOST_CANN_DIMENSIONS 12

/* A tensor: `strides` in bytes, `item` bytes for each element, `data` the address of the first. */
struct host_cann_view {
    void* data;
    int64_t item;
    int32_t dimensions;
    int64_t sizes[HOST_CANN_DIMENSIONS];
    int64_t strides[HOST_CANN_DIMENSIONS];
};

/* Enqueues a task that fails, with the operator's name, if one of these tensors is no longer what it is at the call. */
int host_cann_watch(void* stream, const char* name, int count, const struct host_cann_view* views);

/* Enqueues a task that writes a tensor; `from` holds its elements in row-major order and is copied at the call. */
int host_cann_write(void* stream, const struct host_cann_view* to, const void* from);

/* --- for tests ------------------------------------------------------------------------------------------------------ */

/* A random delay of 0 to `maximum` microseconds before each task from now on; every stream draws its own sequence from `seed`.
 * At the start of the process: HOST_CANN_JITTER_US (0) and HOST_CANN_SEED (0). */
void host_cann_set_jitter(uint32_t maximum, uint64_t seed);

/* Enqueue a task that waits: for some time, or until host_cann_release of the same stream. One release opens one hold. */
int host_cann_delay(void* stream, uint32_t microseconds);
int host_cann_hold(void* stream);
int host_cann_release(void* stream);

/* Enqueues a task that fails with this code and text. */
int host_cann_fail(void* stream, int code, const char* text);

/* Names of runtime functions that were called though the stand-in does not have them (build.py makes one that does nothing for
 * each), separated by blanks, each once. */
const char* host_cann_missing(void);
void host_cann_note_missing(const char* name);

#ifdef __cplusplus
}
#endif
#endif
