// Communicators, and the work that their calls put on streams.
//
// Environment, read by each process when first needed, time limits whenever something starts:
//   HOST_HCCL_SYNC=1         a task ends only when the receivers' tasks have taken its messages
//   HOST_HCCL_TIMEOUT        seconds that a task, or the creation of a communicator, waits for its peers; if not set:
//                            the communicator's own limit or HCCL_EXEC_TIMEOUT (1836); HCCL_CONNECT_TIMEOUT (120)
//   HOST_HCCL_TRACE=FILE     record of calls (hccl_trace.cpp)
//   RANK                     number of the process in messages and in the record
#ifndef HOST_HCCL_WORK_H
#define HOST_HCCL_WORK_H

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hccl/hccl_types.h"
#include "hccl_link.h"

namespace host_hccl {

enum Call : uint8_t {
    SEND_RECV,
    ALL_REDUCE,
    ALL_GATHER,
    ALL_GATHER_V,
    REDUCE_SCATTER,
    REDUCE_SCATTER_V,
    BROADCAST,
    REDUCE,
    SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    ALL_TO_ALL_VC,
    BARRIER
};
const char* name_of_call(uint8_t call);

struct Settings {      // of a communicator, as its HcclCommConfig gave them; -1: not given
    std::string name;  // name in messages and in the trace
    int64_t buffer_mb = -1, deterministic = -1, traffic_class = -1, service_level = -1, world_rank = -1, qos = -1,
            exec_timeout = -1;
};

struct Communicator {
    std::string id;  // the same on all ranks and on no other communicator
    Settings settings;
    uint32_t rank = 0, size = 0;
    std::vector<std::shared_ptr<Link>> links;  // by rank; empty at the own one

    std::mutex lock;
    std::condition_variable idle;
    uint64_t queued = 0, finished = 0;     // tasks
    uint64_t collectives = 0;              // calls so far
    std::vector<uint64_t> sent, received;  // point-to-point calls so far, by peer
    int error = SUCCESS;                   // of the first task that failed
    std::string error_text;
    bool destroyed = false;

    int world_rank(uint32_t r) const {
        return links[r] ? links[r]->world() : -1;
    }  // RANK of another rank, as far as known
    std::string describe() const;  // "communicator 'NAME' (ID), rank 1 of 4"
};

using Comm = std::shared_ptr<Communicator>;

inline void check_rank(const Communicator& comm, uint32_t rank, const char* what) {
    if (rank >= comm.size)
        throw Failure(E_PARA, std::string(what) + " is " + std::to_string(rank) + "; " + comm.describe());
}

struct Out {
    uint32_t to;
    const void* data;
    uint64_t bytes;
    uint64_t serial;
};
struct In {
    uint32_t from;
    void* data;
    uint64_t bytes;
    uint64_t serial;
};

// What one call moves. `out` is read and `in` written when the stream reaches the task, not before.
struct Exchange {
    std::string name;  // entry point, for messages and the trace
    Channel channel;
    Call call;
    int type;
    std::vector<Out> out;
    std::vector<In> in;
    uint64_t stage_bytes = 0;              // for each rank, memory behind `in`, made when the task runs: reductions
    std::vector<std::vector<char>> stage;  // that memory, by rank
    std::function<void(Exchange&)> after;  // after everything arrived
};

// Puts the exchange on the stream. `shown`: fields of the trace line of this call.
int enqueue(const std::shared_ptr<Communicator>& comm, Exchange exchange, void* stream, const std::string& shown);

// The communicator behind a handle; throws Failure when it is none, destroyed, or has failed before.
std::shared_ptr<Communicator> find(void* handle);

int report(const Failure& failure, const std::string& where);  // error text for the caller; the result code
// Around the body of every entry point: an error becomes a result code and a text.
template <class Body>
HcclResult guarded(const char* call, Body body) {
    try {
        body();
        return HCCL_SUCCESS;
    } catch (const Failure& failure) { return (HcclResult)report(failure, call); }
}
double time_limit(const Settings& settings);  // seconds of a task that starts now
double connect_limit();
bool synchronous();

// HOST_HCCL_TRACE: one JSON object per line, appended by all processes.
bool tracing();
void trace(const std::string& fields);
std::string field(const char* name, uint64_t value);  // "name": value
std::string quoted(const std::string& text);
long long now_ns();

}  // namespace host_hccl
#endif
