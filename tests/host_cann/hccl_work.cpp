// Stand-in for HCCL: the tasks behind the calls (see hccl_work.h).
//
// A task writes its messages, takes those of the others, and acknowledges each to its sender. With HOST_HCCL_SYNC=1 it
// ends only when all of its own messages are acknowledged, that is, when the receivers' tasks have them: a send without
// its receive then blocks its stream, as it may on hardware. A task that waits longer than the time limit fails.
#include "hccl_work.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hccl_data.h"
#include "host_cann.h"

namespace host_hccl {

static const int TASK_FAILED = 507000;  // acl: error of the runtime while a task ran

static double seconds_of(const char* name, double fallback) {
    const char* text = getenv(name);
    if (!text || !*text) return fallback;
    char* end = nullptr;
    const double value = strtod(text, &end);
    if (*end || !(value >= 0)) throw Failure(E_PARA, std::string(name) + " is " + text + "; valid: seconds, 0 or more");
    return value == 0 ? 1e6 : value;  // 0: for ever, as for the real variables
}

double time_limit(const Settings& settings) {
    const double real =
        settings.exec_timeout > 0 ? (double)settings.exec_timeout : seconds_of("HCCL_EXEC_TIMEOUT", 1836);
    return seconds_of("HOST_HCCL_TIMEOUT", real);
}

double connect_limit() { return seconds_of("HOST_HCCL_TIMEOUT", seconds_of("HCCL_CONNECT_TIMEOUT", 120)); }

bool synchronous() {
    static const bool on = [] {
        const char* text = getenv("HOST_HCCL_SYNC");
        return text && strcmp(text, "1") == 0;
    }();
    return on;
}

const char* name_of_call(uint8_t call) {
    static const char* const names[] = {"HcclSend or HcclBatchSendRecv",
                                        "HcclAllReduce",
                                        "HcclAllGather",
                                        "HcclAllGatherV",
                                        "HcclReduceScatter",
                                        "HcclReduceScatterV",
                                        "HcclBroadcast",
                                        "HcclReduce",
                                        "HcclScatter",
                                        "HcclAlltoAll",
                                        "HcclAlltoAllV",
                                        "HcclAlltoAllVC",
                                        "HcclBarrier"};
    return call < sizeof names / sizeof *names ? names[call] : "an unknown call";
}

std::string Communicator::describe() const {
    std::string text = "communicator '" + settings.name + "'";
    if (settings.name != id) text += " (" + id.substr(0, 8) + ")";
    return text + ", rank " + std::to_string(rank) + " of " + std::to_string(size);
}

int report(const Failure& failure, const std::string& where) {
    const std::string text = "[stand-in HCCL] " + where + ": " + failure.what();
    host_cann_set_error(text.c_str());
    fprintf(stderr, "%s\n", text.c_str());
    return failure.code;
}

static std::string bytes(uint64_t n) { return std::to_string(n) + " bytes"; }

static std::string limit_text(double seconds) {
    char text[32];
    snprintf(text, sizeof text, "%g s", seconds);
    return text;
}

// ---- one task -----------------------------------------------------------------------------------------------

struct Task {
    std::shared_ptr<Communicator> comm;
    Exchange exchange;
    long long number;
};

static void store(const Communicator& comm, const Exchange& exchange, const In& in, const Message& message) {
    const Header& h = message.header;
    const std::string from = "the message of " + comm.links[in.from]->who();
    if (h.call != exchange.call)
        throw Failure(E_TRANSFER, from + " comes from " + name_of_call(h.call) + " (" + bytes(h.bytes) +
                                      "): the ranks make different calls");
    if (h.bytes != in.bytes)
        throw Failure(E_TRANSFER, from + " has " + bytes(h.bytes) + ", this rank expects " + bytes(in.bytes));
    if (h.type != exchange.type)
        throw Failure(E_TRANSFER,
                      from + " has type " + name_of(h.type) + ", this rank expects " + name_of(exchange.type));
    if (in.bytes) memcpy(in.data, message.data.get(), in.bytes);
}

static void to_itself(const Communicator& comm, const Exchange& exchange) {
    auto out = exchange.out.begin();
    for (const In& in : exchange.in) {
        if (in.from != comm.rank) continue;
        while (out != exchange.out.end() && out->to != comm.rank) ++out;
        if (out == exchange.out.end()) throw Failure(E_PARA, "a receive from the own rank has no send");
        if (out->bytes != in.bytes)
            throw Failure(E_TRANSFER, "sends itself " + bytes(out->bytes) + " and expects " + bytes(in.bytes));
        if (in.bytes) memmove(in.data, out->data, in.bytes);
        ++out;
    }
    for (; out != exchange.out.end(); ++out)
        if (out->to == comm.rank) throw Failure(E_PARA, "a send to the own rank has no receive");
}

static void move(Communicator& comm, Exchange& exchange) {
    const double limit = time_limit(comm.settings);
    const Deadline deadline = Clock::now() + std::chrono::microseconds((long long)(limit * 1e6));
    const Channel channel = exchange.channel;
    if (exchange.stage_bytes) {
        exchange.stage.assign(comm.size, std::vector<char>(exchange.stage_bytes));
        for (In& in : exchange.in) in.data = exchange.stage[in.from].data();
    }
    Header header{};
    header.kind = DATA;
    header.channel = channel;
    header.call = exchange.call;
    header.type = (uint8_t)exchange.type;
    for (const Out& out : exchange.out) {
        if (out.to == comm.rank) continue;
        header.serial = out.serial;
        header.bytes = out.bytes;
        comm.links[out.to]->send(header, out.data, deadline);
    }
    to_itself(comm, exchange);
    for (const In& in : exchange.in) {
        if (in.from == comm.rank) continue;
        Link& link = *comm.links[in.from];
        Message message;
        if (!link.take(channel, in.serial, message, deadline))
            throw Failure(E_TIMEOUT, "waited " + limit_text(limit) + " for " + bytes(in.bytes) + " from " +
                                         link.who() + ", in vain; " + link.waiting());
        store(comm, exchange, in, message);
        if (synchronous()) {
            Header acknowledgement{};
            acknowledgement.kind = TAKEN;
            acknowledgement.channel = channel;
            acknowledgement.serial = in.serial;
            link.send(acknowledgement, nullptr, deadline);
        }
    }
    if (synchronous()) {
        for (const Out& out : exchange.out) {
            if (out.to == comm.rank) continue;
            Link& link = *comm.links[out.to];
            if (!link.taken(channel, out.serial, deadline))
                throw Failure(E_TIMEOUT, "waited " + limit_text(limit) + " until " + link.who() + " takes " +
                                             bytes(out.bytes) + ", in vain (HOST_HCCL_SYNC=1)");
        }
    }
    if (exchange.after) exchange.after(exchange);
}

static void finish(Communicator& comm) {
    std::lock_guard<std::mutex> guard(comm.lock);
    comm.finished++;
    comm.idle.notify_all();
}

static int run(void* argument) {
    std::unique_ptr<Task> task((Task*)argument);
    Communicator& comm = *task->comm;
    const long long start = tracing() ? now_ns() : 0;
    int result = 0;
    std::string before;
    {
        std::lock_guard<std::mutex> guard(comm.lock);
        before = comm.error_text;
    }
    if (!before.empty()) {  // one failure ends a communicator; its text is the cause of all that follows
        host_cann_set_error(before.c_str());
        result = TASK_FAILED;
    } else {
        try {
            move(comm, task->exchange);
        } catch (const Failure& failure) {
            const std::string where = task->exchange.name + " on " + comm.describe();
            report(failure, where);
            std::lock_guard<std::mutex> guard(comm.lock);
            if (comm.error == SUCCESS) {
                comm.error = failure.code;
                comm.error_text = "[stand-in HCCL] " + where + ": " + failure.what();
            }
            result = TASK_FAILED;
        }
    }
    if (tracing())
        trace("\"event\": \"ran\", \"call\": " + std::to_string(task->number) +
              ", \"start\": " + std::to_string(start) + ", \"end\": " + std::to_string(now_ns()) +
              ", \"ok\": " + (result ? "false" : "true"));
    finish(comm);
    return result;
}

int enqueue(const std::shared_ptr<Communicator>& comm, Exchange exchange, void* stream, const std::string& shown) {
    static std::atomic<long long> calls{0};
    const long long number = calls++;
    if (tracing()) {
        char handle[32];
        snprintf(handle, sizeof handle, "%p", stream);
        trace("\"event\": \"call\", \"call\": " + std::to_string(number) + ", \"name\": " + quoted(exchange.name) +
              ", \"comm\": " + quoted(comm->settings.name) + ", \"id\": " + quoted(comm->id) +
              ", \"rank\": " + std::to_string(comm->rank) + ", \"size\": " + std::to_string(comm->size) +
              ", \"stream\": \"" + handle + "\", \"time\": " + std::to_string(now_ns()) + ", " + shown);
    }
    {
        std::lock_guard<std::mutex> guard(comm->lock);
        comm->queued++;
    }
    Task* task = new Task{comm, std::move(exchange), number};
    const int result = host_cann_enqueue(stream, run, task);
    if (result) {
        delete task;
        finish(*comm);
        throw Failure(E_PARA, "the stream does not take the task (acl error " + std::to_string(result) + ")");
    }
    return SUCCESS;
}

}  // namespace host_hccl
