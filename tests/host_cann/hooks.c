/* Tasks that tests put into streams: one that takes its time, one that fails. (Holding up a stream is in queue.c.) */
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

enum { TEXT = 2048 };

static int delay(void* microseconds) {
    pause_for((uintptr_t)microseconds);
    return ACL_SUCCESS;
}

int host_cann_delay(void* stream, uint32_t microseconds) {
    return host_cann_enqueue(stream, delay, (void*)(uintptr_t)microseconds);
}

struct failure {
    int code;
    char text[TEXT];
};

static int fail(void* argument) {
    struct failure* failure = argument;
    int code = failure->code;
    host_cann_set_error(failure->text);
    free(failure);
    return code;
}

int host_cann_fail(void* stream, int code, const char* text) {
    struct failure* failure = calloc(1, sizeof *failure);
    if (!failure) return ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    failure->code = code;
    strncpy(failure->text, text ? text : "", TEXT - 1);
    return host_cann_enqueue(stream, fail, failure);
}
