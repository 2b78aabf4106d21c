/* The environment, error texts, functions that are missing, the current device, the old way to operators. */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl_op_compiler.h"
#include "runtime.h"

uint64_t setting(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || *end || *text == '-') {
        fprintf(stderr, "host_cann: %s=%s is no whole number\n", name, text);
        exit(2);
    }
    return value;
}

/* --- error texts ---------------------------------------------------------------------------------------------------- */

static __thread char text[4096];
static __thread char told[4096];

void host_cann_set_error(const char* given) { snprintf(text, sizeof text, "%s", given ? given : ""); }
void set_error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
}
const char* error_text(void) { return text; }
/* Each text is told once, as by the real library. */
const char* aclGetRecentErrMsg(void) {
    memcpy(told, text, sizeof told);
    text[0] = 0;
    return told[0] ? told : "host_cann: no further detail";
}

/* --- functions that are not here ------------------------------------------------------------------------------------ */

static pthread_mutex_t missing_lock = PTHREAD_MUTEX_INITIALIZER;
static char missing[16384];

void host_cann_note_missing(const char* name) {
    char word[256];
    snprintf(word, sizeof word, " %s ", name);
    pthread_mutex_lock(&missing_lock);
    if (!strstr(missing, word)) {
        size_t length = strlen(missing);
        snprintf(missing + length, sizeof missing - length, "%s", word);
    }
    pthread_mutex_unlock(&missing_lock);
    set_error("host_cann: %s is not part of the stand-in", name);
}
const char* host_cann_missing(void) { return missing; }

/* --- the device ----------------------------------------------------------------------------------------------------- */

static __thread int32_t device;

static int32_t devices(void) {
    uint64_t count = setting("HOST_CANN_DEVICES", 16);
    if (count < 1 || count > 64) {
        fprintf(stderr, "host_cann: HOST_CANN_DEVICES=%llu; valid: 1 to 64\n", (unsigned long long)count);
        exit(2);
    }
    return (int32_t)count;
}
int32_t current_device(void) { return device; }

aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = (uint32_t)devices();
    return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t wanted) {
    if (wanted < 0 || wanted >= devices()) {
        set_error("host_cann: device %d; there are %d (HOST_CANN_DEVICES)", wanted, devices());
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    device = wanted;
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* current) {
    *current = device;
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t ended) {
    (void)ended;
    return ACL_SUCCESS;
}
/* One context for each device: its address is the handle. */
static char contexts[64];
aclError aclrtGetCurrentContext(aclrtContext* context) {
    *context = &contexts[device];
    return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    ptrdiff_t index = (char*)context - contexts;
    if (index < 0 || index >= devices()) return ACL_ERROR_RT_PARAM_INVALID;
    device = (int32_t)index;
    return ACL_SUCCESS;
}
int aclrtGetPrimaryCtxState(int32_t asked, uint32_t* flags, int32_t* active) {
    (void)asked;
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

/* --- the old way to operators, always refused, so that nothing is left uncomputed without a word ---------------------- */

struct aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
    (void)data, (void)size;
    return calloc(1, 64);
}
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    free((void*)buffer);
    return ACL_SUCCESS;
}
aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* sizes, aclFormat format) {
    (void)type, (void)count, (void)sizes, (void)format;
    return calloc(1, 64);
}
void aclDestroyTensorDesc(const aclTensorDesc* description) { free((void*)description); }
aclopAttr* aclopCreateAttr(void) { return calloc(1, 64); }
void aclopDestroyAttr(const aclopAttr* attributes) { free((void*)attributes); }

static aclError refuse(const char* operator_name) {
    set_error("host_cann: operator %s has no implementation in the stand-in (aclop path)", operator_name);
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}
aclError aclopCompileAndExecute(const char* type, int inputs, const aclTensorDesc* const in[], const aclDataBuffer* const data[],
                                int outputs, const aclTensorDesc* const out[], aclDataBuffer* const results[],
                                const aclopAttr* attributes, aclopEngineType engine, aclopCompileType compile, const char* path,
                                aclrtStream stream) {
    (void)inputs, (void)in, (void)data, (void)outputs, (void)out, (void)results;
    (void)attributes, (void)engine, (void)compile, (void)path, (void)stream;
    return refuse(type);
}
aclError aclopCompileAndExecuteV2(const char* type, int inputs, aclTensorDesc* in[], aclDataBuffer* data[], int outputs,
                                  aclTensorDesc* out[], aclDataBuffer* results[], aclopAttr* attributes, aclopEngineType engine,
                                  aclopCompileType compile, const char* path, aclrtStream stream) {
    (void)inputs, (void)in, (void)data, (void)outputs, (void)out, (void)results;
    (void)attributes, (void)engine, (void)compile, (void)path, (void)stream;
    return refuse(type);
}
