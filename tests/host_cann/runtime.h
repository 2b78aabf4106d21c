/* Shared by the C sources of libascendcl; libopapi and libhccl see host_cann.h only. */
#ifndef HOST_CANN_RUNTIME_H
#define HOST_CANN_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "host_cann.h"

/* queue.c: a stream's worker and its queue. Handles stay valid memory for ever, so that a stale one is an error and no crash. */
struct stream;
struct stream* stream_make(int32_t device);
struct stream* stream_of(void* handle);                                 /* NULL handle: the default stream; NULL result: no stream */
int stream_wait(struct stream* stream, int64_t milliseconds);           /* -1: without limit; 0 or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT */
int stream_take_error(struct stream* stream);                           /* returns and forgets; its text becomes this thread's */
bool stream_idle(struct stream* stream);
uint32_t stream_id(struct stream* stream);
void stream_close(struct stream* stream);                               /* no task is lost; the worker ends after the last */
void pause_for(uint64_t microseconds);
int device_wait(int32_t device, int64_t milliseconds);                  /* all streams of a device; returns and forgets their errors */

/* runtime.c */
int32_t current_device(void);
void set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* error_text(void);
uint64_t setting(const char* name, uint64_t otherwise);                 /* a whole number from the environment; ends the process if it is none */

/* memory.c */
bool is_pinned(const void* pointer);

#endif
