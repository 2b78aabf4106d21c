/* Streams: a worker thread for each, with a first in, first out queue of tasks, a random delay before each task if wanted, and the
 * first error since the last synchronize. torch_npu makes dozens of streams and uses few, so a worker starts with its first task. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

enum { DEVICES = 64, TEXT = 2048 };

struct task {
    host_cann_task run;
    void* argument;
    struct task* next;
};

struct stream {
    uint32_t id;
    int32_t device;
    pthread_mutex_t lock;
    pthread_cond_t work, progress;        /* for the worker; for those who wait */
    struct task *first, *last;
    uint64_t enqueued, done;
    uint64_t holds, releases;             /* of host_cann_hold: ticket numbers */
    uint64_t drawn;                       /* random delays so far, for this seed */
    uint64_t seed;
    bool started, closed;
    int error;
    char text[TEXT];
    struct stream* next;
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream* all;
static struct stream* defaults[DEVICES];
static uint32_t made;
static uint64_t jitter_seed;
static uint32_t jitter;
static __thread struct stream* working;   /* the stream whose worker this thread is */

/* --- delays --------------------------------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void read_environment(void) {
    __atomic_store_n(&jitter_seed, setting("HOST_CANN_SEED", 0), __ATOMIC_RELAXED);
    __atomic_store_n(&jitter, (uint32_t)setting("HOST_CANN_JITTER_US", 0), __ATOMIC_RELAXED);
}

void host_cann_set_jitter(uint32_t maximum, uint64_t seed) {
    pthread_once(&once, read_environment);
    __atomic_store_n(&jitter_seed, seed, __ATOMIC_RELAXED);
    __atomic_store_n(&jitter, maximum, __ATOMIC_RELAXED);
}

void pause_for(uint64_t microseconds) {
    struct timespec left = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000) * 1000};
    while (microseconds && nanosleep(&left, &left) != 0) {
    }
}

/* splitmix64 (Steele, Lea, Flood 2014), as a function of seed, stream and number of the draw. */
static uint64_t draw(struct stream* s) {
    uint64_t seed = __atomic_load_n(&jitter_seed, __ATOMIC_RELAXED);
    if (seed != s->seed) s->seed = seed, s->drawn = 0;
    uint64_t x = seed * 0xd1342543de82ef95u + s->id * 0xda942042e4dd58b5u + ++s->drawn * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void lag(struct stream* s) {
    uint64_t maximum = __atomic_load_n(&jitter, __ATOMIC_RELAXED);
    if (maximum) pause_for(draw(s) % (maximum + 1));
}

/* --- the worker ----------------------------------------------------------------------------------------------------- */

static void* work(void* argument) {
    struct stream* s = working = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->closed) pthread_cond_wait(&s->work, &s->lock);
        struct task* task = s->first;
        if (!task) break;
        s->first = task->next;
        if (!s->first) s->last = NULL;
        pthread_mutex_unlock(&s->lock);

        lag(s);
        host_cann_set_error("");
        int error = task->run(task->argument);
        free(task);

        pthread_mutex_lock(&s->lock);
        if (error && !s->error) {
            s->error = error;
            strncpy(s->text, error_text(), TEXT - 1);
        }
        s->done++;
        pthread_cond_broadcast(&s->progress);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* With the stream's lock held. */
static bool start(struct stream* s) {
    pthread_t thread;
    if (!s->started && pthread_create(&thread, NULL, work, s) == 0) {
        pthread_detach(thread);
        s->started = true;
    }
    return s->started;
}

int host_cann_enqueue(void* handle, host_cann_task run, void* argument) {
    struct stream* s = stream_of(handle);
    struct task* task = s ? malloc(sizeof *task) : NULL;
    if (!task) return s ? ACL_ERROR_RT_RESOURCE_ALLOC_FAIL : ACL_ERROR_RT_PARAM_INVALID;
    *task = (struct task){run, argument, NULL};
    pthread_mutex_lock(&s->lock);
    if (!start(s)) {
        pthread_mutex_unlock(&s->lock);
        free(task);
        set_error("host_cann: no thread could be started for stream %u", s->id);
        return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    }
    if (s->last) s->last->next = task;
    else s->first = task;
    s->last = task;
    s->enqueued++;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    return ACL_SUCCESS;
}

/* --- making, finding, closing --------------------------------------------------------------------------------------- */

/* With all_lock held. */
static struct stream* add(int32_t device) {
    struct stream* s = calloc(1, sizeof *s);
    if (!s) return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
    s->id = ++made;
    s->device = device;
    s->next = all;
    return all = s;
}

struct stream* stream_make(int32_t device) {
    pthread_once(&once, read_environment);
    pthread_mutex_lock(&all_lock);
    struct stream* s = add(device);
    pthread_mutex_unlock(&all_lock);
    return s;
}

struct stream* stream_of(void* handle) {
    pthread_once(&once, read_environment);
    struct stream* found = NULL;
    pthread_mutex_lock(&all_lock);
    if (!handle) {
        int32_t device = current_device();
        if (!defaults[device]) defaults[device] = add(device);
        found = defaults[device];
    } else {
        for (found = all; found && found != handle;) found = found->next;
    }
    pthread_mutex_unlock(&all_lock);
    if (!found || found->closed) {
        set_error("host_cann: %p is no stream, or one that was destroyed", handle);
        return NULL;
    }
    return found;
}

void stream_close(struct stream* s) {
    pthread_mutex_lock(&s->lock);
    s->closed = true;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
}

uint32_t stream_id(struct stream* s) { return s->id; }

/* --- waiting -------------------------------------------------------------------------------------------------------- */

bool stream_idle(struct stream* s) {
    pthread_mutex_lock(&s->lock);
    bool idle = s->done == s->enqueued;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

int stream_wait(struct stream* s, int64_t milliseconds) {
    if (s == working) {
        set_error("host_cann: a task of stream %u waits for its own stream", s->id);
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t nanoseconds = end.tv_nsec + (milliseconds % 1000) * 1000000;
    end.tv_sec += milliseconds / 1000 + nanoseconds / 1000000000;
    end.tv_nsec = nanoseconds % 1000000000;
    int late = 0;
    pthread_mutex_lock(&s->lock);
    uint64_t goal = s->enqueued;
    while (s->done < goal && !late) {
        if (milliseconds < 0) pthread_cond_wait(&s->progress, &s->lock);
        else late = pthread_cond_timedwait(&s->progress, &s->lock, &end);
    }
    bool complete = s->done >= goal;
    pthread_mutex_unlock(&s->lock);
    if (!complete) set_error("host_cann: stream %u has unfinished tasks after %lld ms", s->id, (long long)milliseconds);
    return complete ? ACL_SUCCESS : ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
}

static int error_of(struct stream* s, bool forget) {
    pthread_mutex_lock(&s->lock);
    int error = s->error;
    if (error) host_cann_set_error(s->text);
    if (forget) s->error = 0;
    pthread_mutex_unlock(&s->lock);
    return error;
}

int stream_take_error(struct stream* s) { return error_of(s, true); }

int host_cann_drain(void* handle) {
    struct stream* s = stream_of(handle);
    if (!s) return ACL_ERROR_RT_PARAM_INVALID;
    int error = stream_wait(s, -1);
    return error ? error : error_of(s, false);
}

int device_wait(int32_t device, int64_t milliseconds) {
    pthread_mutex_lock(&all_lock);
    struct stream* first = all;  /* the list only grows, at its head */
    pthread_mutex_unlock(&all_lock);
    int result = ACL_SUCCESS;
    for (struct stream* s = first; s; s = s->next) {
        if (s->device != device) continue;
        int error = stream_wait(s, milliseconds);
        if (!error) error = result ? stream_take_error(s), 0 : stream_take_error(s);
        if (error && !result) result = error;
    }
    return result;
}

/* --- holding up ----------------------------------------------------------------------------------------------------- */

static int held(void* ignored) {
    (void)ignored;
    struct stream* s = working;
    pthread_mutex_lock(&s->lock);
    uint64_t ticket = ++s->holds;
    while (s->releases < ticket) pthread_cond_wait(&s->progress, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return ACL_SUCCESS;
}

int host_cann_hold(void* stream) { return host_cann_enqueue(stream, held, NULL); }

int host_cann_release(void* stream) {
    struct stream* s = stream_of(stream);
    if (!s) return ACL_ERROR_RT_PARAM_INVALID;
    pthread_mutex_lock(&s->lock);
    s->releases++;
    pthread_cond_broadcast(&s->progress);
    pthread_mutex_unlock(&s->lock);
    return ACL_SUCCESS;
}

