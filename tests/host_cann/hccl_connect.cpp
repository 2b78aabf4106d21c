// Stand-in for HCCL: how the ranks of a communicator find each other (connect_all in hccl_link.h).
//
// Every rank listens under a name made of the communicator's identifier and its rank, calls the ranks below itself and
// is called by those above.
#include "hccl_link.h"

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace host_hccl {

static socklen_t abstract_name(sockaddr_un& address, const std::string& id, uint32_t rank) {
    address = {};
    address.sun_family = AF_UNIX;
    // a leading zero byte: a name without a file
    int n = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "host_hccl/%s/%u", id.c_str(), rank);
    if (n <= 0 || (size_t)n >= sizeof address.sun_path - 1)
        throw Failure(E_PARA, "identifier of the communicator is too long: " + id);
    return (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + (size_t)n);
}

// Closes on the way out, unless released.
struct Socket {
    explicit Socket(int fd) : fd(fd) {}
    Socket(const Socket&) = delete;
    ~Socket() {
        if (fd >= 0) close(fd);
    }
    int release() {
        const int given = fd;
        fd = -1;
        return given;
    }
    int fd;
};

// Each tells the other who it is. The peer may take its time: it answers when it comes to it.
static void greet(int fd, const Peer& self, Peer& other, Deadline deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::seconds>(deadline - Clock::now()).count();
    timeval limit{left < 0 ? 1 : (time_t)left + 1, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (::send(fd, &self, sizeof self, MSG_NOSIGNAL) != (ssize_t)sizeof self ||
        recv(fd, &other, sizeof other, MSG_WAITALL) != (ssize_t)sizeof other)
        throw Failure(E_TCP_CONNECT, "a peer ended or did not answer while the communicator was made");
    int room = 4 << 20;  // fewer wake-ups for large messages; the kernel cuts it to what it allows
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
}

std::vector<std::shared_ptr<Link>> connect_all(const std::string& id, uint32_t rank, uint32_t size, Deadline deadline,
                                               double seconds) {
    const char* world = getenv("RANK");
    const Peer self{rank, size, world ? atoi(world) : -1, (int32_t)getpid()};
    std::vector<std::shared_ptr<Link>> links(size);
    sockaddr_un address;
    Socket listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (listener.fd < 0) throw Failure(E_TCP_CONNECT, std::string("socket: ") + strerror(errno));
    auto fail = [&](int code, const std::string& why) -> Failure {
        return Failure(
            code, "communicator " + id + ", rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " + why);
    };
    socklen_t length = abstract_name(address, id, rank);
    if (bind(listener.fd, (sockaddr*)&address, length) || listen(listener.fd, (int)size))
        throw fail(E_PARA, std::string("another process has this rank already, or the name cannot be used: ") +
                               strerror(errno));
    auto meet = [&](Socket& peer) {
        Peer other{};
        greet(peer.fd, self, other, deadline);
        if (other.size != size)
            throw fail(E_PARA, "rank " + std::to_string(other.rank) + " says that it has " +
                                   std::to_string(other.size) + " ranks");
        if (other.rank >= size || other.rank == rank || links[other.rank])
            throw fail(E_PARA, "two processes say that they are rank " + std::to_string(other.rank));
        links[other.rank] = std::make_shared<Link>(peer.release(), other);
    };
    // every rank calls the ranks below itself and is called by those above
    for (;;) {
        bool all = true;
        for (uint32_t r = 0; r < rank; r++) {
            if (links[r]) continue;
            Socket peer(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            length = abstract_name(address, id, r);
            if (peer.fd >= 0 && connect(peer.fd, (sockaddr*)&address, length) == 0)
                meet(peer);
            else
                all = false;
        }
        for (;;) {
            Socket peer(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC));
            if (peer.fd < 0) break;
            meet(peer);
        }
        for (uint32_t r = rank + 1; r < size; r++) all = all && links[r];
        if (all) break;
        if (Clock::now() >= deadline) {
            std::string missing;
            for (uint32_t r = 0; r < size; r++)
                if (r != rank && !links[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
            char limit[32];
            snprintf(limit, sizeof limit, "%g", seconds);
            throw fail(E_TIMEOUT, "rank " + missing + " did not join within " + limit + " s");
        }
        pollfd p{listener.fd, POLLIN, 0};
        poll(&p, 1, 2);  // short: the ranks below may start to listen at any time
    }
    for (auto& link : links)
        if (link) start_reading(link);
    return links;
}

std::string random_identifier() {
    uint64_t words[2] = {};
    if (getrandom(words, sizeof words, 0) != (ssize_t)sizeof words) throw Failure(E_TCP_CONNECT, "getrandom failed");
    char text[40];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)words[0], (unsigned long long)words[1]);
    return text;
}

}  // namespace host_hccl
