/* aclrt streams, events, and what runs on a stream: copies, fills, callbacks.
 *
 * A record makes a mark, which a task of the stream sets. A wait is for the mark that the event had at the call: recording the
 * event again changes nothing for those who wait already, as on a device. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

/* --- streams -------------------------------------------------------------------------------------------------------- */

aclError aclrtCreateStream(aclrtStream* stream) {
    *stream = stream_make(current_device());
    return *stream ? ACL_SUCCESS : ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}
aclError aclrtDestroyStreamForce(aclrtStream stream) {
    struct stream* s = stream_of(stream);
    if (s) stream_close(s);
    return s ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtDestroyStream(aclrtStream stream) {
    struct stream* s = stream_of(stream);
    int error = s ? stream_wait(s, -1) : ACL_ERROR_RT_PARAM_INVALID;
    return error ? error : aclrtDestroyStreamForce(stream);
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    struct stream* s = stream_of(stream);
    if (s) *id = (int32_t)stream_id(s);
    return s ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    struct stream* s = stream_of(stream);
    if (s) *status = stream_idle(s) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return s ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    struct stream* s = stream_of(stream);
    if (!s) return ACL_ERROR_RT_PARAM_INVALID;
    int error = stream_wait(s, timeout);
    return error ? error : stream_take_error(s);
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return device_wait(current_device(), timeout); }
aclError aclrtSynchronizeDevice(void) { return device_wait(current_device(), -1); }
/* Tasks after a failed one run on, whatever mode is asked for: the error is kept, and that is what torch_npu looks at. */
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    (void)mode;
    return stream_of(stream) ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

/* --- events --------------------------------------------------------------------------------------------------------- */

struct mark {
    int holders;
    bool set;
    struct timespec time;
};
/* A handle stays valid memory for ever, so that a stale one is an error and no crash. */
struct event {
    struct mark* mark;  /* of the last record; NULL before the first */
    bool destroyed;
};

static pthread_mutex_t marks = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t mark_set = PTHREAD_COND_INITIALIZER;

/* All three with `marks` locked. */
static struct mark* hold(struct mark* mark) {
    if (mark) mark->holders++;
    return mark;
}
static void let_go(struct mark* mark) {
    if (mark && --mark->holders == 0) free(mark);
}
static void await(struct mark* mark) {
    while (!mark->set) pthread_cond_wait(&mark_set, &marks);
}

static int set_mark(void* argument) {
    struct mark* mark = argument;
    pthread_mutex_lock(&marks);
    mark->set = true;
    clock_gettime(CLOCK_MONOTONIC, &mark->time);
    pthread_cond_broadcast(&mark_set);
    let_go(mark);
    pthread_mutex_unlock(&marks);
    return ACL_SUCCESS;
}
static int await_mark(void* argument) {
    pthread_mutex_lock(&marks);
    await(argument);
    let_go(argument);
    pthread_mutex_unlock(&marks);
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(struct event));
    return *event ? ACL_SUCCESS : ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }
aclError aclrtDestroyEvent(aclrtEvent event) {
    pthread_mutex_lock(&marks);
    struct event* ended = event;
    let_go(ended->mark);
    *ended = (struct event){NULL, true};
    pthread_mutex_unlock(&marks);
    return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    struct mark* mark = calloc(1, sizeof *mark);
    if (!mark) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    mark->holders = 2;  /* the event and the task */
    int error = host_cann_enqueue(stream, set_mark, mark);
    if (error) {
        free(mark);
        return error;
    }
    pthread_mutex_lock(&marks);
    let_go(((struct event*)event)->mark);
    ((struct event*)event)->mark = mark;
    pthread_mutex_unlock(&marks);
    return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    (void)event;
    return stream_of(stream) ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    pthread_mutex_lock(&marks);
    bool destroyed = ((struct event*)event)->destroyed;
    struct mark* mark = hold(((struct event*)event)->mark);
    pthread_mutex_unlock(&marks);
    if (destroyed) {
        set_error("host_cann: a stream waits for event %p, which was destroyed", event);
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    int error = mark ? host_cann_enqueue(stream, await_mark, mark) : ACL_SUCCESS;
    if (error) {
        pthread_mutex_lock(&marks);
        let_go(mark);
        pthread_mutex_unlock(&marks);
    }
    return error;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) {
    pthread_mutex_lock(&marks);
    struct mark* mark = hold(((struct event*)event)->mark);
    if (mark) await(mark);
    let_go(mark);
    pthread_mutex_unlock(&marks);
    return ACL_SUCCESS;
}
static bool complete(struct event* event) {
    pthread_mutex_lock(&marks);
    bool set = !event->mark || event->mark->set;
    pthread_mutex_unlock(&marks);
    return set;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    *status = complete(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus* status) { return aclrtQueryEventStatus(event, status); }
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
    *status = complete(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) { return aclrtQueryEventWaitStatus(event, status); }
aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
    const struct event *from = start, *to = end;
    aclError result = ACL_ERROR_RT_EVENT_NOT_COMPLETE;
    pthread_mutex_lock(&marks);
    if (from->mark && to->mark && from->mark->set && to->mark->set) {
        const struct timespec *a = &from->mark->time, *b = &to->mark->time;
        *ms = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
        result = ACL_SUCCESS;
    }
    pthread_mutex_unlock(&marks);
    return result;
}

/* --- what runs on a stream ------------------------------------------------------------------------------------------ */

struct copy {
    void* to;
    const void* from;  /* staged: bytes that follow this structure */
    size_t bytes;
    int32_t value;
    char staged[];
};

static int run_copy(void* argument) {
    struct copy* copy = argument;
    memmove(copy->to, copy->from, copy->bytes);
    free(copy);
    return ACL_SUCCESS;
}
static int run_fill(void* argument) {
    struct copy* copy = argument;
    memset(copy->to, copy->value, copy->bytes);
    free(copy);
    return ACL_SUCCESS;
}

static int enqueue_copy(aclrtStream stream, host_cann_task run, const struct copy* plan, bool stage) {
    struct copy* copy = malloc(sizeof *copy + (stage ? plan->bytes : 0));
    if (!copy) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    *copy = *plan;
    if (stage) copy->from = memcpy(copy->staged, plan->from, plan->bytes);
    int error = host_cann_enqueue(stream, run, copy);
    if (error) free(copy);
    return error;
}

/* Pageable memory of the host takes no part in an asynchronous copy: it is read at the call, or written before the call returns. */
aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
    if (count > destMax) {
        set_error("host_cann: aclrtMemcpyAsync of %zu bytes to room for %zu", count, destMax);
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    bool stage = kind == ACL_MEMCPY_HOST_TO_DEVICE && !is_pinned(src);
    int error = enqueue_copy(stream, run_copy, &(struct copy){.to = dst, .from = src, .bytes = count}, stage);
    if (!error && kind == ACL_MEMCPY_DEVICE_TO_HOST && !is_pinned(dst)) error = stream_wait(stream_of(stream), -1);
    return error;
}
aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(dst, room, src, count, kind, stream);
}
aclError aclrtMemsetAsync(void* dst, size_t room, int32_t value, size_t count, aclrtStream stream) {
    if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
    return enqueue_copy(stream, run_fill, &(struct copy){.to = dst, .value = value, .bytes = count}, false);
}

struct call {
    void (*function)(void*);
    void* argument;
};
static int run_call(void* argument) {
    struct call call = *(struct call*)argument;
    free(argument);
    call.function(call.argument);
    return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
    struct call* call = malloc(sizeof *call);
    if (!call) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    *call = (struct call){function, argument};
    int error = host_cann_enqueue(stream, run_call, call);
    if (error) free(call);
    return error;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType block, aclrtStream stream) {
    (void)block;
    return aclrtLaunchHostFunc(stream, function, argument);
}
