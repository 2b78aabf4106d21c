// Stand-in for HCCL: communicators - creating, asking, destroying.
//
// Creating one blocks until all of its ranks are there, as the real library does. Signatures: hccl.h in the wheel.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <unistd.h>

#include "hccl/hccl.h"
#include "hccl_work.h"
#include "host_cann.h"

namespace host_hccl {

static std::mutex registry_lock;
// Never destroyed: worker threads may use it while the process ends.
static std::map<void*, std::shared_ptr<Communicator>>& registry() {
    static auto* all = new std::map<void*, std::shared_ptr<Communicator>>;
    return *all;
}

std::shared_ptr<Communicator> find(void* handle) {
    std::shared_ptr<Communicator> comm;
    {
        std::lock_guard<std::mutex> guard(registry_lock);
        auto found = registry().find(handle);
        if (found == registry().end()) throw Failure(E_PTR, "the handle is no communicator, or it was destroyed");
        comm = found->second;
    }
    std::lock_guard<std::mutex> guard(comm->lock);
    if (comm->error) throw Failure(comm->error, comm->describe() + " failed before: " + comm->error_text);
    return comm;
}

static std::string text_of(const char* field, size_t room) { return std::string(field, strnlen(field, room)); }

static int64_t given(uint32_t value) { return value == 0xffffffffu ? -1 : (int64_t)value; }

static Settings settings_of(const HcclCommConfig* config, const std::string& id) {
    Settings s;
    s.name = id;
    if (!config) return s;
    uint32_t magic;
    memcpy(&magic, config->reserved + sizeof(size_t), sizeof magic);  // as HcclCommConfigInit lays it out
    if (magic != HCCL_COMM_CONFIG_MAGIC_WORD)
        throw Failure(E_PARA, "the configuration was not initialised by HcclCommConfigInit");
    if (config->hcclBufferSize == 0) throw Failure(E_PARA, "hccl_buffer_size is 0; valid: 1 or more megabytes");
    s.buffer_mb = given(config->hcclBufferSize);
    s.deterministic = given(config->hcclDeterministic);
    s.traffic_class = given(config->hcclRdmaTrafficClass);
    s.service_level = given(config->hcclRdmaServiceLevel);
    s.world_rank = config->hcclWorldRankID;
    s.exec_timeout = config->hcclExecTimeOut == HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET ? -1 : config->hcclExecTimeOut;
    s.qos = given(config->hcclQos);
    const std::string name = text_of(config->hcclCommName, sizeof config->hcclCommName);
    if (!name.empty()) s.name = name;
    return s;
}

static std::string shown(const Settings& s) {
    return "\"buffer_mb\": " + std::to_string(s.buffer_mb) + ", \"qos\": " + std::to_string(s.qos) +
           ", \"traffic_class\": " + std::to_string(s.traffic_class) +
           ", \"service_level\": " + std::to_string(s.service_level) +
           ", \"deterministic\": " + std::to_string(s.deterministic) +
           ", \"exec_timeout\": " + std::to_string(s.exec_timeout);
}

static void create(const char* call, const std::string& id, uint32_t rank, uint32_t size, const HcclCommConfig* config,
                   HcclComm* out) {
    if (!out) throw Failure(E_PTR, "no place for the communicator");
    if (size == 0 || rank >= size)
        throw Failure(E_PARA, "rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks");
    auto comm = std::make_shared<Communicator>();
    comm->id = id;
    comm->settings = settings_of(config, id);
    comm->rank = rank;
    comm->size = size;
    comm->sent.resize(size);
    comm->received.resize(size);
    const double limit = connect_limit();
    trace(std::string("\"event\": \"create\", \"name\": \"") + call + "\", \"comm\": " + quoted(comm->settings.name) +
          ", \"id\": " + quoted(id) + ", \"rank\": " + std::to_string(rank) + ", \"size\": " + std::to_string(size) +
          ", \"time\": " + std::to_string(now_ns()) + ", " + shown(comm->settings));
    comm->links =
        connect_all(id, rank, size, Clock::now() + std::chrono::microseconds((long long)(limit * 1e6)), limit);
    *out = comm.get();
    std::lock_guard<std::mutex> guard(registry_lock);
    registry()[comm.get()] = comm;
}

// Tasks that still make progress may finish; those that wait for a peer are interrupted.
static void destroy(HcclComm handle) {
    std::shared_ptr<Communicator> comm;
    {
        std::lock_guard<std::mutex> guard(registry_lock);
        auto found = registry().find(handle);
        if (found == registry().end())
            throw Failure(E_PTR, "the handle is no communicator, or it was destroyed before");
        comm = found->second;
        registry().erase(found);
    }
    {
        std::unique_lock<std::mutex> guard(comm->lock);
        const auto patience = std::chrono::seconds(2);
        for (uint64_t seen = comm->finished; comm->finished < comm->queued; seen = comm->finished)
            if (!comm->idle.wait_for(guard, patience, [&] { return comm->finished != seen; })) break;
    }
    for (auto& link : comm->links) {
        if (!link) continue;
        link->interrupt();
        link->goodbye();
    }
    trace("\"event\": \"destroy\", \"comm\": " + quoted(comm->settings.name) + ", \"id\": " + quoted(comm->id) +
          ", \"rank\": " + std::to_string(comm->rank) + ", \"time\": " + std::to_string(now_ns()));
}

// A rank table: JSON with one "rank_id" for each rank. All ranks of a job have the same one, so it identifies the
// communicator, together with what tells jobs with the same table apart: the port and the process that started them.
struct Table {
    std::string id;
    uint32_t ranks;
};

static Table read_table(const char* path) {
    std::ifstream file(path ? path : "");
    if (!file) throw Failure(E_PARA, std::string("the rank table ") + (path ? path : "(null)") + " cannot be read");
    std::stringstream content;
    content << file.rdbuf();
    const std::string text = content.str(), key = "\"rank_id\"";
    uint32_t ranks = 0;
    for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) ranks++;
    if (!ranks) throw Failure(E_PARA, std::string("the rank table ") + path + " names no rank_id");
    const char* port = getenv("MASTER_PORT");
    const size_t digest = std::hash<std::string>()(text + (port ? port : ""));
    return {"table-" + std::to_string(digest) + "-" + std::to_string(getppid()), ranks};
}

}  // namespace host_hccl

using namespace host_hccl;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    return guarded("HcclGetRootInfo", [&] {
        memset(info, 0, sizeof *info);
        snprintf(info->internal, sizeof info->internal, "%s", random_identifier().c_str());
    });
}

HcclResult HcclGetRootInfoScalable(HcclRootInfo* info) { return HcclGetRootInfo(info); }

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
    return guarded("HcclCommInitRootInfoConfig", [&] {
        create("HcclCommInitRootInfoConfig", text_of(info->internal, 64), rank, size, config, comm);
    });
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
    return guarded("HcclCommInitRootInfo",
                   [&] { create("HcclCommInitRootInfo", text_of(info->internal, 64), rank, size, nullptr, comm); });
}

// Several roots share the work of meeting; here the first one's identifier does.
HcclResult HcclCommInitRootInfoScalable(uint32_t size, uint32_t roots, const HcclRootInfo* list, uint32_t rank,
                                        uint32_t, const HcclCommConfig* config, HcclComm* comm) {
    return guarded("HcclCommInitRootInfoScalable", [&] {
        if (!roots) throw Failure(E_PARA, "no root");
        create("HcclCommInitRootInfoScalable", text_of(list->internal, 64), rank, size, config, comm);
    });
}

HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t size, uint32_t* ranks, uint64_t id, uint32_t rank,
                                   HcclCommConfig* config, HcclComm* comm) {
    return guarded("HcclCreateSubCommConfig", [&] {
        auto from = find(*parent);
        for (uint32_t i = 0; i < size; i++)
            if (ranks[i] >= from->size)
                throw Failure(E_PARA, "rank " + std::to_string(ranks[i]) + " is not in " + from->describe());
        if (rank >= size || ranks[rank] != from->rank)
            throw Failure(E_PARA, "rank " + std::to_string(from->rank) + " is not number " + std::to_string(rank) +
                                      " of the ranks given");
        create("HcclCreateSubCommConfig", from->id.substr(0, 40) + "." + std::to_string(id), rank, size, config, comm);
    });
}

HcclResult HcclCommInitClusterInfoConfig(const char* path, uint32_t rank, HcclCommConfig* config, HcclComm* comm) {
    return guarded("HcclCommInitClusterInfoConfig", [&] {
        const Table table = read_table(path);
        create("HcclCommInitClusterInfoConfig", table.id, rank, table.ranks, config, comm);
    });
}

HcclResult HcclCommDestroy(HcclComm comm) {
    return guarded("HcclCommDestroy", [&] { destroy(comm); });
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
    return guarded("HcclGetCommName",
                   [&] { snprintf(name, COMM_NAME_MAX_LENGTH, "%s", find(comm)->settings.name.c_str()); });
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
    return guarded("HcclGetRankSize", [&] { *size = find(comm)->size; });
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    return guarded("HcclGetRankId", [&] { *rank = find(comm)->rank; });
}

// The first error of a task. Tells nothing about peers that nobody waits for.
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
    std::shared_ptr<Communicator> comm;
    {
        std::lock_guard<std::mutex> guard(registry_lock);
        auto found = registry().find(handle);
        if (found == registry().end()) return HCCL_E_PTR;
        comm = found->second;
    }
    std::lock_guard<std::mutex> guard(comm->lock);
    *error = (HcclResult)comm->error;
    if (comm->error) host_cann_set_error(comm->error_text.c_str());
    return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
    switch ((int)code) {
        case SUCCESS: return "success";
        case E_PARA: return "wrong argument";
        case E_PTR: return "no such communicator";
        case E_NOT_SUPPORT: return "not supported";
        case E_TIMEOUT: return "time limit passed";
        case E_TCP_CONNECT: return "peers could not be connected";
        case E_TRANSFER: return "ranks do not agree on a transfer";
        case E_REMOTE: return "a peer is gone";
        default: return "error";
    }
}

// All settings of HcclCommConfig are accepted (and, but for the name and the execution time limit, only recorded).
uint32_t HcclGetCommConfigCapability(void) { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

}  // namespace host_hccl
