/* Results that come late, for operators that are computed at the call (HOST_CANN_LATE in README.md).
 *
 * An operator of a device reads its inputs and writes its results some time after the call. Computed at the call, it would hide that
 * somebody reads the result too early or overwrites an input too early. So the result is written by a task of the stream, and another task,
 * before it, looks whether the inputs are what they were at the call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

/* --- walking through a tensor ------------------------------------------------------------------------------------------ */

/* Calls `visit` with each run of bytes that lies together, in row-major order. */
static void walk(const struct host_cann_view* view, int dimension, char* at, void (*visit)(void*, char*, size_t), void* argument) {
    if (dimension == view->dimensions) {
        visit(argument, at, (size_t)view->item);
        return;
    }
    bool last = dimension == view->dimensions - 1;
    if (last && view->strides[dimension] == view->item) {
        visit(argument, at, (size_t)(view->sizes[dimension] * view->item));
        return;
    }
    for (int64_t i = 0; i < view->sizes[dimension]; i++) walk(view, dimension + 1, at + i * view->strides[dimension], visit, argument);
}

static size_t bytes_of(const struct host_cann_view* view) {
    int64_t bytes = view->item;
    for (int i = 0; i < view->dimensions; i++) bytes *= view->sizes[i];
    return (size_t)bytes;
}

static bool valid(const struct host_cann_view* view) {
    if (view->dimensions >= 0 && view->dimensions <= HOST_CANN_DIMENSIONS && view->item > 0) return true;
    set_error("host_cann: a view with %d dimensions; valid: 0 to %d", view->dimensions, HOST_CANN_DIMENSIONS);
    return false;
}

/* --- inputs that must not change ----------------------------------------------------------------------------------------- */

/* A sum that depends on the order of the bytes: words times powers of an odd number, after FNV (Fowler, Noll, Vo). */
static void add_up(void* sum, char* bytes, size_t count) {
    uint64_t total = *(uint64_t*)sum, word;
    size_t i = 0;
    for (; i + sizeof word <= count; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        total = (total ^ word) * 0x100000001b3u;
        total ^= total >> 29;
    }
    for (; i < count; i++) total = (total ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    *(uint64_t*)sum = total;
}
static uint64_t checksum(const struct host_cann_view* view) {
    uint64_t sum = 0xcbf29ce484222325u;
    if (bytes_of(view)) walk(view, 0, view->data, add_up, &sum);
    return sum;
}

struct watch {
    char name[128];
    int count;
    struct input {
        struct host_cann_view view;
        uint64_t sum;
    } inputs[];
};

static int look(void* argument) {
    struct watch* watch = argument;
    int changed = -1;
    for (int i = watch->count - 1; i >= 0; i--)
        if (checksum(&watch->inputs[i].view) != watch->inputs[i].sum) changed = i;
    if (changed >= 0)
        set_error("host_cann: input %d of %s was overwritten before the operator ran: a stream does not wait for this one", changed, watch->name);
    free(watch);
    return changed >= 0 ? ACL_ERROR_RT_AICORE_EXCEPTION : ACL_SUCCESS;
}

int host_cann_watch(void* stream, const char* name, int count, const struct host_cann_view* views) {
    struct watch* watch = calloc(1, sizeof *watch + (size_t)count * sizeof watch->inputs[0]);
    if (!watch) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    snprintf(watch->name, sizeof watch->name, "%s", name);
    watch->count = count;
    for (int i = 0; i < count; i++) {
        if (!valid(&views[i])) {
            free(watch);
            return ACL_ERROR_RT_PARAM_INVALID;
        }
        watch->inputs[i] = (struct input){views[i], checksum(&views[i])};
    }
    int error = host_cann_enqueue(stream, look, watch);
    if (error) free(watch);
    return error;
}

/* --- results ------------------------------------------------------------------------------------------------------------- */

struct result {
    struct host_cann_view to;
    const char* next;
    char bytes[];
};

static void put(void* argument, char* to, size_t count) {
    struct result* result = argument;
    memcpy(to, result->next, count);
    result->next += count;
}
static int write_result(void* argument) {
    struct result* result = argument;
    walk(&result->to, 0, result->to.data, put, result);
    free(result);
    return ACL_SUCCESS;
}

int host_cann_write(void* stream, const struct host_cann_view* to, const void* from) {
    if (!valid(to)) return ACL_ERROR_RT_PARAM_INVALID;
    size_t bytes = bytes_of(to);
    if (!bytes) return ACL_SUCCESS;
    struct result* result = malloc(sizeof *result + bytes);
    if (!result) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    result->to = *to;
    result->next = memcpy(result->bytes, from, bytes);
    int error = host_cann_enqueue(stream, write_result, result);
    if (error) free(result);
    return error;
}
