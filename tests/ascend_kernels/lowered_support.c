/* What code lowered by MLIR calls at run time: a copy between strided buffers, and rounding of fp32 to bf16. */
#include <stdint.h>
#include <string.h>

/* A buffer of any rank; its description is: allocated, aligned, offset, sizes[rank], strides[rank]. */
struct buffer {
    int64_t rank;
    int64_t *about;
};

static void copy_rows(int64_t bytes, int64_t rank, const char *from, char *to, const int64_t *sizes,
                      const int64_t *from_strides, const int64_t *to_strides)
{
    if (rank == 0) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < sizes[0]; i++)
        copy_rows(bytes, rank - 1, from + i * from_strides[0] * bytes, to + i * to_strides[0] * bytes, sizes + 1,
                  from_strides + 1, to_strides + 1);
}

void memrefCopy(int64_t bytes, struct buffer *from, struct buffer *to)
{
    int64_t rank = from->rank;
    const char *source = (const char *)from->about[1] + from->about[2] * bytes;
    char *target = (char *)to->about[1] + to->about[2] * bytes;
    copy_rows(bytes, rank, source, target, from->about + 3, from->about + 3 + rank, to->about + 3 + rank);
}

/* Round to nearest, ties to even. LLVM takes the 16 bits of the result from a float register. */
float __truncsfbf2(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits = (bits >> 16) | 0x40u;
    else
        bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bits &= 0xffffu;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}
