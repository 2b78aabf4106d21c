// Stand-in for HCCL: data types and reductions (see hccl_data.h).
#include "hccl_data.h"

#include <cmath>
#include <cstring>

#include "hccl_link.h"

namespace host_hccl {

struct TypeInfo {
    int type;
    uint64_t bytes;
    const char* name;
};
static const TypeInfo TYPES[] = {
    {INT8, 1, "int8"},       {INT16, 2, "int16"},   {INT32, 4, "int32"},     {FP16, 2, "fp16"},
    {FP32, 4, "fp32"},       {INT64, 8, "int64"},   {UINT64, 8, "uint64"},   {UINT8, 1, "uint8"},
    {UINT16, 2, "uint16"},   {UINT32, 4, "uint32"}, {FP64, 8, "fp64"},       {BFP16, 2, "bfp16"},
    {INT128, 16, "int128"},  {HIF8, 1, "hif8"},     {FP8E4M3, 1, "fp8e4m3"}, {FP8E5M2, 1, "fp8e5m2"},
    {FP8E8M0, 1, "fp8e8m0"},
};

static const TypeInfo& info(int type) {
    for (const TypeInfo& t : TYPES)
        if (t.type == type) return t;
    throw Failure(E_PARA, "data type " + std::to_string(type) + " is not known");
}

uint64_t size_of(int type) { return info(type).bytes; }
const char* name_of(int type) { return info(type).name; }

void check_reduction(int type, int op) {
    const std::string name = name_of(type);
    if (op < SUM || op > MIN)
        throw Failure(E_PARA, "reduction " + std::to_string(op) + " is not known; valid: 0 (sum) to 3 (min)");
    switch (type) {
        case INT8:
        case INT16:
        case INT32:
        case INT64:
        case FP16:
        case FP32:
        case BFP16: break;
        default:
            throw Failure(E_NOT_SUPPORT,
                          "no reduction of " + name + "; valid: int8, int16, int32, int64, fp16, fp32, bfp16");
    }
    if (op == PROD && (type == INT16 || type == BFP16)) throw Failure(E_NOT_SUPPORT, "no product of " + name);
}

// ---- 16-bit floating point ----------------------------------------------------------------------------------

static float from_half(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    float value = exponent == 31
                      ? (fraction ? NAN : INFINITY)
                      : std::ldexp((float)(exponent ? fraction | 1024 : fraction), (exponent ? exponent : 1) - 25);
    return h & 0x8000 ? -value : value;
}

static uint16_t to_half(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float a = std::fabs(value);
    if (std::isnan(a)) return sign | 0x7e00;
    if (a >= 65520.f) return sign | 0x7c00;  // halfway past the largest number
    if (a < 0x1p-14f)
        return sign | (uint16_t)std::nearbyint(a * 0x1p24f);  // subnormal; 1024 is the first normal number
    int exponent;
    const float m = std::frexp(a, &exponent);  // a = m * 2^exponent, 0.5 <= m < 1
    // 1024..2048 units; a carry to 2048 moves into the exponent by plain addition
    return sign | (uint16_t)(((exponent + 13) << 10) + (int)std::nearbyint(m * 2048.f));
}

static float from_bfloat(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (std::isnan(value)) return (uint16_t)(bits >> 16 | 64);
    const uint32_t rest = bits & 0xffff, kept = bits >> 16;
    return (uint16_t)(kept + (rest > 0x8000 || (rest == 0x8000 && (kept & 1))));
}

// ---- reductions ---------------------------------------------------------------------------------------------

template <class V>
static V join(V a, V b, int op) {
    switch (op) {
        case SUM: return (V)(a + b);
        case PROD: return (V)(a * b);
        case MAX: return a < b ? b : a;
        default: return b < a ? b : a;
    }
}

// Store: type in memory; Work: type of the arithmetic.
template <class Store, class Work, class Up, class Down>
static void run(const std::vector<const char*>& parts, char* out, uint64_t count, int op, Up up, Down down) {
    Store element;
    for (uint64_t i = 0; i < count; i++) {
        memcpy(&element, parts[0] + i * sizeof(Store), sizeof(Store));
        Work value = up(element);
        for (size_t p = 1; p < parts.size(); p++) {
            memcpy(&element, parts[p] + i * sizeof(Store), sizeof(Store));
            value = join<Work>(value, up(element), op);
        }
        element = down(value);
        memcpy(out + i * sizeof(Store), &element, sizeof(Store));
    }
}

template <class V>
static void run_same(const std::vector<const char*>& parts, char* out, uint64_t count, int op) {
    auto same = [](V v) { return v; };
    run<V, V>(parts, out, count, op, same, same);
}

void reduce(const std::vector<const char*>& parts, char* out, uint64_t count, int type, int op) {
    check_reduction(type, op);
    switch (type) {
        case INT8: return run_same<int8_t>(parts, out, count, op);
        case INT16: return run_same<int16_t>(parts, out, count, op);
        case INT32: return run_same<int32_t>(parts, out, count, op);
        case INT64: return run_same<int64_t>(parts, out, count, op);
        case FP32: return run_same<float>(parts, out, count, op);
        case FP16: return run<uint16_t, float>(parts, out, count, op, from_half, to_half);
        case BFP16: return run<uint16_t, float>(parts, out, count, op, from_bfloat, to_bfloat);
    }
}

}  // namespace host_hccl
