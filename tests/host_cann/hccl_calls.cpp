// Stand-in for HCCL: collectives, each as an Exchange (hccl_work.h).
//
// Every part goes straight to the rank that needs it; reductions are made by the receiver, in the order of ranks. That
// is not how the hardware does it (rings, trees, halving), and says nothing about its time or rounding.
#include "hccl/hccl.h"
#include "hccl_data.h"
#include "hccl_work.h"

namespace host_hccl {

struct Part {
    uint64_t offset, bytes;
};

static std::vector<Part> equal_parts(uint32_t size, uint64_t bytes, bool apart) {
    std::vector<Part> parts;
    for (uint32_t r = 0; r < size; r++) parts.push_back({apart ? r * bytes : 0, bytes});
    return parts;
}

static std::vector<Part> given_parts(uint32_t size, const void* counts, const void* offsets, uint64_t element) {
    if (!counts || !offsets) throw Failure(E_PTR, "no counts or displacements");
    std::vector<Part> parts;
    for (uint32_t r = 0; r < size; r++)
        parts.push_back({((const uint64_t*)offsets)[r] * element, ((const uint64_t*)counts)[r] * element});
    return parts;
}

// Rank r gets out[r] of `send`, and sends what lands in in[r] of `receive`. Parts of no bytes travel too: they keep the
// ranks in step, and a size on one side only is an error.
static Exchange all_parts(const Comm& comm, const char* name, Call call, int type, const void* send,
                          const std::vector<Part>& out, void* receive, const std::vector<Part>& in) {
    Exchange exchange{name, COLLECTIVE, call, type, {}, {}, 0, {}, nullptr};
    std::lock_guard<std::mutex> guard(comm->lock);
    const uint64_t serial = comm->collectives++;
    for (uint32_t r = 0; r < comm->size; r++) {
        exchange.out.push_back({r, (const char*)send + out[r].offset, out[r].bytes, serial});
        exchange.in.push_back({r, (char*)receive + in[r].offset, in[r].bytes, serial});
    }
    return exchange;
}

// Send out[r] to rank r, then reduce what all ranks sent here (`bytes` each) into `receive`; not where that is null.
static Exchange reduced(const Comm& comm, const char* name, Call call, int type, int op, const void* send,
                        const std::vector<Part>& out, void* receive, uint64_t bytes) {
    check_reduction(type, op);
    Exchange exchange = all_parts(comm, name, call, type, send, out, nullptr, equal_parts(comm->size, bytes, false));
    exchange.after = [=](Exchange& self) {
        std::vector<const char*> parts;
        for (auto& part : self.stage) parts.push_back(part.data());
        if (receive && bytes) reduce(parts, (char*)receive, bytes / size_of(type), type, op);
    };
    exchange.stage_bytes = bytes;
    return exchange;
}

static const std::vector<Part> nothing(const Comm& comm) { return equal_parts(comm->size, 0, false); }

// A collective over `count` elements: make(comm, bytes) is its exchange. `root`: NO_ROOT, or a rank of it.
constexpr uint32_t NO_ROOT = UINT32_MAX;
template <class Make>
static HcclResult collective(const char* name, HcclComm handle, aclrtStream stream, uint64_t count, HcclDataType type,
                             uint32_t root, Make make) {
    return guarded(name, [&] {
        Comm comm = find(handle);
        if (root != NO_ROOT) check_rank(*comm, root, "root");
        const uint64_t bytes = count * size_of(type);
        enqueue(comm, make(comm, bytes), stream,
                field("bytes", bytes) + (root == NO_ROOT ? "" : ", " + field("root", root)));
    });
}

}  // namespace host_hccl

using namespace host_hccl;

extern "C" {

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
    return collective("HcclAllReduce", handle, stream, count, type, NO_ROOT, [&](Comm& comm, uint64_t bytes) {
        return reduced(comm, "HcclAllReduce", ALL_REDUCE, type, op, send, equal_parts(comm->size, bytes, false), receive,
                       bytes);
    });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
    return collective("HcclReduce", handle, stream, count, type, root, [&](Comm& comm, uint64_t bytes) {
        std::vector<Part> out = nothing(comm);
        out[root].bytes = bytes;
        const bool mine = comm->rank == root;
        return reduced(comm, "HcclReduce", REDUCE, type, op, send, out, mine ? receive : nullptr, mine ? bytes : 0);
    });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm handle, aclrtStream stream) {
    return collective("HcclReduceScatter", handle, stream, count, type, NO_ROOT, [&](Comm& comm, uint64_t bytes) {
        return reduced(comm, "HcclReduceScatter", REDUCE_SCATTER, type, op, send, equal_parts(comm->size, bytes, true),
                       receive, bytes);
    });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* offsets, void* receive, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
    return collective("HcclReduceScatterV", handle, stream, count, type, NO_ROOT, [&](Comm& comm, uint64_t bytes) {
        return reduced(comm, "HcclReduceScatterV", REDUCE_SCATTER_V, type, op, send,
                       given_parts(comm->size, counts, offsets, size_of(type)), receive, bytes);
    });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm handle,
                         aclrtStream stream) {
    return collective("HcclAllGather", handle, stream, count, type, NO_ROOT, [&](Comm& comm, uint64_t bytes) {
        return all_parts(comm, "HcclAllGather", ALL_GATHER, type, send, equal_parts(comm->size, bytes, false), receive,
                         equal_parts(comm->size, bytes, true));
    });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* offsets,
                          HcclDataType type, HcclComm handle, aclrtStream stream) {
    return collective("HcclAllGatherV", handle, stream, count, type, NO_ROOT, [&](Comm& comm, uint64_t bytes) {
        return all_parts(comm, "HcclAllGatherV", ALL_GATHER_V, type, send, equal_parts(comm->size, bytes, false),
                         receive, given_parts(comm->size, counts, offsets, size_of(type)));
    });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
    return collective("HcclBroadcast", handle, stream, count, type, root, [&](Comm& comm, uint64_t bytes) {
        std::vector<Part> in = nothing(comm);
        in[root].bytes = bytes;
        return all_parts(comm, "HcclBroadcast", BROADCAST, type, buffer,
                         equal_parts(comm->size, comm->rank == root ? bytes : 0, false), buffer, in);
    });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
    return collective("HcclScatter", handle, stream, count, type, root, [&](Comm& comm, uint64_t bytes) {
        std::vector<Part> in = nothing(comm);
        in[root].bytes = bytes;
        return all_parts(comm, "HcclScatter", SCATTER, type, send,
                         comm->rank == root ? equal_parts(comm->size, bytes, true) : nothing(comm), receive, in);
    });
}

static void all_to_all(const char* name, Call call, const Comm& comm, const void* send, const std::vector<Part>& out,
                       HcclDataType type, const void* receive, const std::vector<Part>& in, void* stream) {
    uint64_t bytes = 0;
    for (const Part& part : out) bytes += part.bytes;
    enqueue(comm, all_parts(comm, name, call, type, send, out, const_cast<void*>(receive), in), stream,
            field("bytes", bytes));
}

static uint64_t one_size(HcclDataType send, HcclDataType receive) {
    if (send != receive)
        throw Failure(E_PARA, std::string("sends ") + name_of(send) + " and receives " + name_of(receive));
    return size_of(send);
}

HcclResult HcclAlltoAll(const void* send, uint64_t sent, HcclDataType type, const void* receive, uint64_t received,
                        HcclDataType other, HcclComm handle, aclrtStream stream) {
    return guarded("HcclAlltoAll", [&] {
        Comm comm = find(handle);
        const uint64_t element = one_size(type, other);
        all_to_all("HcclAlltoAll", ALL_TO_ALL, comm, send, equal_parts(comm->size, sent * element, true), type, receive,
                   equal_parts(comm->size, received * element, true), stream);
    });
}

HcclResult HcclAlltoAllV(const void* send, const void* sent, const void* from, HcclDataType type, const void* receive,
                         const void* received, const void* to, HcclDataType other, HcclComm handle,
                         aclrtStream stream) {
    return guarded("HcclAlltoAllV", [&] {
        Comm comm = find(handle);
        const uint64_t element = one_size(type, other);
        all_to_all("HcclAlltoAllV", ALL_TO_ALL_V, comm, send, given_parts(comm->size, sent, from, element), type,
                   receive, given_parts(comm->size, received, to, element), stream);
    });
}

// counts[i * size + j]: elements that rank i sends to rank j; parts lie one after another on both sides
HcclResult HcclAlltoAllVC(const void* send, const void* counts, HcclDataType type, const void* receive,
                          HcclDataType other, HcclComm handle, aclrtStream stream) {
    return guarded("HcclAlltoAllVC", [&] {
        Comm comm = find(handle);
        const uint64_t element = one_size(type, other), *matrix = (const uint64_t*)counts;
        std::vector<Part> out, in;
        uint64_t sent = 0, received = 0;
        for (uint32_t r = 0; r < comm->size; r++) {
            out.push_back({sent, matrix[comm->rank * comm->size + r] * element});
            in.push_back({received, matrix[r * comm->size + comm->rank] * element});
            sent += out[r].bytes;
            received += in[r].bytes;
        }
        all_to_all("HcclAlltoAllVC", ALL_TO_ALL_VC, comm, send, out, type, receive, in, stream);
    });
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
    return guarded("HcclBarrier", [&] {
        Comm comm = find(handle);
        enqueue(comm, all_parts(comm, "HcclBarrier", BARRIER, INT8, nullptr, nothing(comm), nullptr, nothing(comm)),
                stream, field("bytes", 0));
    });
}

}  // extern "C"
