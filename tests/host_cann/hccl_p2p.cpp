// Stand-in for HCCL: point-to-point calls, one by one, as a list, or between HcclGroupStart and HcclGroupEnd.
//
// Messages between two ranks of a communicator are matched in the order of the calls; their sizes are compared, their
// types are not.
#include <mutex>
#include <string>

#include "hccl/hccl.h"
#include "hccl_data.h"
#include "hccl_work.h"

namespace host_hccl {

// HcclGroupStart .. HcclGroupEnd: sends and receives of one thread are collected and issued together.
struct Grouped {
    Comm comm;
    void* stream;
    std::vector<HcclSendRecvItem> items;
};
static thread_local int group_depth = 0;
static thread_local std::vector<Grouped> grouped;

static uint64_t next(Communicator& comm, std::vector<uint64_t>& counts, uint32_t peer) {
    std::lock_guard<std::mutex> guard(comm.lock);
    return counts[peer]++;
}

static void issue(const char* name, const Comm& comm, const HcclSendRecvItem* items, uint32_t count, void* stream) {
    Exchange exchange{name, P2P, SEND_RECV, INT8, {}, {}, 0, {}, nullptr};
    std::string list;
    uint64_t sent = 0, received = 0;
    for (uint32_t i = 0; i < count; i++) {
        const HcclSendRecvItem& item = items[i];
        check_rank(*comm, item.remoteRank, "remoteRank");
        const uint64_t bytes = item.count * size_of(item.dataType);
        const bool sends = item.sendRecvType == HCCL_SEND;
        if (!sends && item.sendRecvType != HCCL_RECV)
            throw Failure(E_PARA, "sendRecvType is neither a send nor a receive");
        if (bytes && !item.buf) throw Failure(E_PTR, "no buffer for " + std::to_string(bytes) + " bytes");
        if (sends)
            exchange.out.push_back({item.remoteRank, item.buf, bytes, next(*comm, comm->sent, item.remoteRank)});
        else
            exchange.in.push_back({item.remoteRank, item.buf, bytes, next(*comm, comm->received, item.remoteRank)});
        (sends ? sent : received) += bytes;
        list += std::string(i ? ", " : "") + "[\"" + (sends ? "send" : "recv") + "\", " +
                std::to_string(item.remoteRank) + ", " + std::to_string(bytes) + "]";
    }
    std::string shown = field("bytes", sent + received) + ", \"items\": [" + list + "]";
    if (count == 1)
        shown += ", " + field("peer", items->remoteRank) +
                 ", \"peer_process\": " + std::to_string(comm->world_rank(items->remoteRank));
    enqueue(comm, std::move(exchange), stream, shown);
}

static void single(const char* name, HcclSendRecvType direction, void* buffer, uint64_t count, HcclDataType type,
                   uint32_t peer, HcclComm handle, void* stream) {
    Comm comm = find(handle);
    check_rank(*comm, peer, direction == HCCL_SEND ? "destRank" : "srcRank");
    if (peer == comm->rank) throw Failure(E_PARA, comm->describe() + " sends to or receives from itself");
    const HcclSendRecvItem item{direction, buffer, count, type, peer};
    if (!group_depth) return issue(name, comm, &item, 1, stream);
    for (Grouped& g : grouped) {
        if (g.comm != comm || g.stream != stream) continue;
        g.items.push_back(item);
        return;
    }
    grouped.push_back({comm, stream, {item}});
}

// Does CANN take this list (JSON; tests/host_cann/cann_rules.py)? 0, or 1 and the reason in `text`.
typedef int (*BatchRules)(const char* call, char* text, uint32_t size);
static BatchRules rules = nullptr;

static void check_list(const Communicator& comm, const HcclSendRecvItem* items, uint32_t count) {
    if (!rules) throw Failure(E_PARA, "libhccl has no rules: tests.host_cann.load() connects them");
    std::string list;
    for (uint32_t i = 0; i < count; i++) {
        const HcclSendRecvItem& item = items[i];
        const bool known = item.sendRecvType == HCCL_SEND || item.sendRecvType == HCCL_RECV;
        const std::string direction = known ? (item.sendRecvType == HCCL_SEND ? "send" : "recv") : std::to_string(item.sendRecvType);
        list += std::string(i ? ", " : "") + "[\"" + direction + "\", " + std::to_string(item.remoteRank) + ", " +
                std::to_string(item.count) + ", " + std::to_string(item.dataType) + "]";
    }
    const std::string call = "{" + field("rank", comm.rank) + ", " + field("ranks", comm.size) + ", " +
                             "\"items\": [" + list + "]}";
    char text[1024] = "";
    if (rules(call.c_str(), text, sizeof text)) throw Failure(E_PARA, text);
}

}  // namespace host_hccl

using namespace host_hccl;

/* For tests.host_cann.load(): the function that knows the rules. */
extern "C" void host_hccl_set_rules(BatchRules function) { rules = function; }

extern "C" {

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
    return guarded("HcclSend", [&] { single("HcclSend", HCCL_SEND, buffer, count, type, to, comm, stream); });
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
    return guarded("HcclRecv", [&] { single("HcclRecv", HCCL_RECV, buffer, count, type, from, comm, stream); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
    return guarded("HcclBatchSendRecv", [&] {
        if (!count) return; /* HCCL warns, and does nothing */
        if (!items) throw Failure(E_PTR, "no list");
        const Comm on = find(comm);
        check_list(*on, items, count);
        issue("HcclBatchSendRecv", on, items, count, stream);
    });
}

HcclResult HcclGroupStart(void) {
    group_depth++;
    return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd(void) {
    return guarded("HcclGroupEnd", [] {
        if (!group_depth) throw Failure(E_PARA, "HcclGroupEnd without HcclGroupStart");
        if (--group_depth) return;
        std::vector<Grouped> work;
        work.swap(grouped);
        for (Grouped& g : work) issue("HcclGroupEnd", g.comm, g.items.data(), (uint32_t)g.items.size(), g.stream);
    });
}

}  // extern "C"
