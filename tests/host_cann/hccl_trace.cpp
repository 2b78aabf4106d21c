// Stand-in for HCCL: the record of calls (HOST_HCCL_TRACE=FILE).
//
// Every process appends whole lines to the same file. A call is recorded when it is made ("event": "call", with name,
// communicator, peer, bytes, stream; peers by their rank in the communicator, `peer_process` by RANK) and again when
// its task has run ("event": "ran", with start and end in nanoseconds of the machine's monotonic clock). `call` numbers
// the calls of a process.
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <unistd.h>

#include "hccl_work.h"

namespace host_hccl {

static int file() {
    static const int fd = [] {
        const char* path = getenv("HOST_HCCL_TRACE");
        if (!path || !*path) return -1;
        int opened = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (opened < 0) fprintf(stderr, "[stand-in HCCL] HOST_HCCL_TRACE=%s cannot be written\n", path);
        return opened;
    }();
    return fd;
}

bool tracing() { return file() >= 0; }

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += (unsigned char)c < 32 ? ' ' : c;
    }
    return out + "\"";
}

std::string field(const char* name, uint64_t value) { return quoted(name) + ": " + std::to_string(value); }

long long now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

void trace(const std::string& fields) {
    if (!tracing()) return;
    static const char* world = getenv("RANK");
    std::string line = "{\"process\": " + std::to_string(world ? atoi(world) : -1) +
                       ", \"pid\": " + std::to_string(getpid()) + ", " + fields + "}\n";
    // one write: lines of several processes do not mix
    if (write(file(), line.data(), line.size()) != (ssize_t)line.size())
        fprintf(stderr, "[stand-in HCCL] a line of HOST_HCCL_TRACE was lost\n");
}

}  // namespace host_hccl
