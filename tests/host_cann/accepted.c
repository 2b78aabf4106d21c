/* Questions about the device and settings of it, all with a fixed answer: what is asked is not modelled. Nothing here computes or
 * moves data; functions that would, and are not in the stand-in, are refused (see build.py). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl_op_compiler.h"
#include "runtime.h"

enum { CUBE_CORES = 24, VECTOR_CORES = 48 };
static const int64_t L2_BYTES = 192ll << 20;

/* The version is for torch_npu's own comparisons; no release of CANN is imitated in particular. */
static const char* version(void) {
    const char* given = getenv("HOST_CANN_VERSION");
    return given && *given ? given : "9.0.0";
}
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* answer) {
    (void)name;
    memset(answer, 0, sizeof *answer);
    snprintf(answer->version, sizeof answer->version, "%s", version());
    sscanf(version(), "%63[^.].%63[^.].%63s", answer->majorVersion, answer->minorVersion, answer->releaseVersion);
    return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char* package, char* answer) {
    (void)package;
    snprintf(answer, ACL_PKG_VERSION_MAX_SIZE, "%s", version());
    return ACL_SUCCESS;
}
const char* aclrtGetSocName(void) {
    const char* name = getenv("HOST_CANN_SOC");
    return name && *name ? name : "Ascend910B1";
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
    (void)device;
    switch (attribute) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = CUBE_CORES; return ACL_SUCCESS;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = VECTOR_CORES; return ACL_SUCCESS;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = L2_BYTES; return ACL_SUCCESS;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: {
            size_t unused, total;
            aclrtGetMemInfo(ACL_HBM_MEM, &unused, &total);
            *value = (int64_t)total;
            return ACL_SUCCESS;
        }
        default: set_error("host_cann: aclrtGetDeviceInfo knows nothing of attribute %d", (int)attribute); return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
}
aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo attribute, int64_t* value) {
    (void)device;
    *value = attribute == ACL_DEVICE_INFO_AI_CORE_NUM ? CUBE_CORES : attribute == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? VECTOR_CORES : L2_BYTES;
    return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
    *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16;
    return ACL_SUCCESS;
}
aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t a, int32_t b) {
    *can = a != b;
    return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
    *logic = user;
    return ACL_SUCCESS;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
    (void)stream;
    *flag = 0;
    return ACL_SUCCESS;
}
static aclError zero(int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) { (void)option; return zero(value); }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { (void)option; return zero(value); }
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
    (void)stream;
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = NULL;
    return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt option) { (void)option; return 16; }
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
    (void)option;
    if (length) value[0] = 0;
    return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { (void)level; return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel level) { (void)level; return ACL_SUCCESS; }

/* Settings and logs: taken, without effect. */
void aclAppLog(aclLogLevel level, const char* function, const char* file, uint32_t line, const char* format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}
aclError aclInit(const char* path) { (void)path; return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
aclError aclSetCompileopt(aclCompileOpt option, const char* value) { (void)option, (void)value; return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { (void)option, (void)value; return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { (void)option, (void)value; return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { (void)mode; return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t timeout) { (void)timeout; return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) { (void)timeout; return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
    if (actual) *actual = timeout;
    return ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) { (void)stream, (void)flag; return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue* value) {
    (void)stream, (void)attribute, (void)value;
    return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { (void)peer, (void)flags; return ACL_SUCCESS; }
