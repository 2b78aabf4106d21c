/* What the files of the stand-in's libopapi share: the handles behind acl's operator interface, and the two phases of a call.
 *
 * An aclnn operator is called in two phases. The first ("...GetWorkspaceSize") gets all arguments, checks what can be checked
 * without looking into tensors, and answers with an executor; the second runs the executor on a stream. Here the first writes
 * the arguments down as JSON, under the names that torch_npu has for them, and asks a Python function whether it takes them; the
 * second waits for the stream's tasks, so that the order within a stream is kept, and has the same function compute on the
 * calling thread, which is the caller's or that of torch_npu's queue. Tensors in the text are addresses: device memory is host memory here.
 */
#ifndef HOST_CANN_OPAPI_H
#define HOST_CANN_OPAPI_H

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

/* A view of memory: element (i, j, ..) is at data + (offset + i * stride[0] + j * stride[1] + ..) elements of that type. */
struct aclTensor {
    std::vector<int64_t> shape;
    std::vector<int64_t> stride;
    int type; /* an aclDataType */
    int64_t offset;
    void* data;
};

struct aclIntArray {
    std::vector<int64_t> numbers;
};

struct aclScalar {
    double value;
};

struct aclOpExecutor {
    std::string name;
    std::string arguments;
};

namespace opapi {

/* One argument: its name and its value as JSON. */
struct Field {
    Field(const char* name, const aclTensor* value);
    Field(const char* name, const aclIntArray* value);
    Field(const char* name, const aclScalar* value);
    Field(const char* name, const char* value);
    Field(const char* name, double value);
    Field(const char* name, int64_t value);
    std::string text;
};

/* Phase one: 0 and an executor, or the code of a refusal, whose text is then the thread's error text. */
int prepare(const char* name, std::initializer_list<Field> fields, uint64_t* workspace, aclOpExecutor** executor);

/* Phase two: 0 if the call was launched. What goes wrong when it computes is an error of the stream, as a kernel's is on a device,
 * and is told at the next synchronize. Deletes the executor. */
int run(aclOpExecutor* executor, void* stream);

}  // namespace opapi

#define FIELD(argument) \
    opapi::Field { #argument, argument }

/* The last two parameters of every phase one, and every phase two. */
#define ANSWER uint64_t *workspace, aclOpExecutor **executor
#define PHASE_TWO(operator_name)                                                                     \
    extern "C" int operator_name(void*, uint64_t, aclOpExecutor* executor, void* stream) { \
        return opapi::run(executor, stream);                                                         \
    }

#endif
