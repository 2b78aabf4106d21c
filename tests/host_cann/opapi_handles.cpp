/* Handles of acl's operator interface: descriptions of tensors, lists of numbers and scalars, made and destroyed by the caller. */
#include "acl/acl_base.h"
#include "opapi.h"

namespace {

/* The value of a scalar as torch_npu passes it; other types are read as 0 by no one here and refused by being NaN. */
double read(const void* value, aclDataType type) {
    switch (type) {
        case ACL_FLOAT: return *static_cast<const float*>(value);
        case ACL_DOUBLE: return *static_cast<const double*>(value);
        case ACL_INT32: return *static_cast<const int32_t*>(value);
        case ACL_INT64: return static_cast<double>(*static_cast<const int64_t*>(value));
        case ACL_BOOL: return *static_cast<const bool*>(value);
        default: return __builtin_nan("");
    }
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* dims, uint64_t count, aclDataType type, const int64_t* stride, int64_t offset, aclFormat,
                           const int64_t*, uint64_t, void* data) {
    return new aclTensor{{dims, dims + count}, {stride, stride + count}, type, offset, data};
}

int aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return 0;
}

aclIntArray* aclCreateIntArray(const int64_t* numbers, uint64_t count) { return new aclIntArray{{numbers, numbers + count}}; }

int aclDestroyIntArray(const aclIntArray* array) {
    delete array;
    return 0;
}

aclScalar* aclCreateScalar(void* value, aclDataType type) { return new aclScalar{read(value, type)}; }

int aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return 0;
}

}  // extern "C"
