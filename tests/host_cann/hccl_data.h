// Data types of HCCL (numbers of hccl_types.h), and the reductions on them.
#ifndef HOST_HCCL_DATA_H
#define HOST_HCCL_DATA_H

#include <cstdint>
#include <string>
#include <vector>

namespace host_hccl {

enum DataType {
    INT8 = 0,
    INT16,
    INT32,
    FP16,
    FP32,
    INT64,
    UINT64,
    UINT8,
    UINT16,
    UINT32,
    FP64,
    BFP16,
    INT128,
    HIF8 = 14,
    FP8E4M3,
    FP8E5M2,
    FP8E8M0
};
enum ReduceOp { SUM = 0, PROD, MAX, MIN };

// Bytes of one element. Throws Failure(E_PARA) for a number that is no type.
uint64_t size_of(int type);
const char* name_of(int type);

// Throws Failure(E_NOT_SUPPORT) for what the documented operators refuse: other types than
// int8, int16, int32, int64, fp16, fp32, bf16, and products of int16 and bf16.
void check_reduction(int type, int op);

// out[i] = parts[0][i] op parts[1][i] op ...: in the order of ranks, so results do not depend on arrival;
// fp16 and bf16 are added up in fp32 and rounded once (to nearest, ties to even).
void reduce(const std::vector<const char*>& parts, char* out, uint64_t count, int type, int op);

}  // namespace host_hccl
#endif
