/* The two phases of a call, and the way of its arguments to Python. */
#include "opapi.h"

#include <cmath>
#include <cstdio>

#include "host_cann.h"

extern "C" const char* aclGetRecentErrMsg(); /* of libascendcl */

namespace {

const int PARAM_NULLPTR = 161001, INNER_ERROR = 561000; /* codes of aclnn */
const int AICORE_EXCEPTION = 507015;                     /* of the runtime: a kernel failed */

/* phase 1: are these arguments taken? 2: compute, for that stream, of which nothing is left to do. Returns 0 or a code, having set
 * the error text. */
typedef int (*Operators)(int phase, const char* name, const char* arguments, void* stream);
Operators operators = nullptr;

std::string list(const std::vector<int64_t>& numbers) {
    std::string text = "[";
    for (int64_t number : numbers) text += (text.size() > 1 ? "," : "") + std::to_string(number);
    return text + "]";
}

std::string quoted(const char* value) {
    std::string text = "\"";
    for (; *value; value++) {
        if (*value == '"' || *value == '\\') text += '\\';
        text += *value;
    }
    return text + "\"";
}

std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    return text;
}

std::string described(const aclTensor* tensor) {
    return "{\"shape\":" + list(tensor->shape) + ",\"stride\":" + list(tensor->stride) + ",\"type\":" + std::to_string(tensor->type) +
           ",\"offset\":" + std::to_string(tensor->offset) + ",\"data\":" + std::to_string(reinterpret_cast<uintptr_t>(tensor->data)) +
           "}";
}

std::string named(const char* name, const std::string& value) { return quoted(name) + ":" + value; }

int ask(int phase, const char* name, const char* arguments, void* stream) {
    if (operators) return operators(phase, name, arguments, stream);
    host_cann_set_error("host_cann: libopapi has no operators: tests.host_cann.load() connects them");
    return INNER_ERROR;
}

}  // namespace

namespace opapi {

Field::Field(const char* name, const aclTensor* value) : text(named(name, value ? described(value) : "null")) {}
Field::Field(const char* name, const aclIntArray* value) : text(named(name, value ? list(value->numbers) : "null")) {}
Field::Field(const char* name, const aclScalar* value) : text(named(name, value ? number(value->value) : "null")) {}
Field::Field(const char* name, const char* value) : text(named(name, value ? quoted(value) : "null")) {}
Field::Field(const char* name, double value) : text(named(name, number(value))) {}
Field::Field(const char* name, int64_t value) : text(named(name, std::to_string(value))) {}

int prepare(const char* name, std::initializer_list<Field> fields, uint64_t* workspace, aclOpExecutor** executor) {
    if (!workspace || !executor) return PARAM_NULLPTR;
    std::string text = "{";
    for (const Field& field : fields) text += (text.size() > 1 ? "," : "") + field.text;
    text += "}";
    *workspace = 0;
    *executor = nullptr;
    int status = ask(1, name, text.c_str(), nullptr);
    if (status == 0) *executor = new aclOpExecutor{name, text};
    return status;
}

int run(aclOpExecutor* executor, void* stream) {
    if (!executor) return PARAM_NULLPTR;
    host_cann_drain(stream); /* what was enqueued before this call comes before it; an error of it stays with the stream */
    int status = ask(2, executor->name.c_str(), executor->arguments.c_str(), stream);
    if (status) status = host_cann_fail(stream, AICORE_EXCEPTION, aclGetRecentErrMsg());
    delete executor;
    return status;
}

}  // namespace opapi

/* For tests.host_cann.load(): the function that answers all calls. */
extern "C" void host_cann_set_operators(Operators function) { operators = function; }
