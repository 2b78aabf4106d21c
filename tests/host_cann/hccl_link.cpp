// Stand-in for HCCL: links (see hccl_link.h).
#include "hccl_link.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace host_hccl {

static const uint32_t MAGIC = 0x48434331;  // "HCC1"

int milliseconds_left(Deadline deadline) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return left < 0 ? 0 : left > 1000 ? 1000 : (int)left;  // in slices, so that nothing sleeps past an event
}

// ---- the reading thread -------------------------------------------------------------------------------------

class Reader {
  public:
    // Never destroyed: it may still read while the process runs its exit handlers.
    static Reader& instance() {
        static Reader* reader = new Reader;
        return *reader;
    }

    void add(const std::shared_ptr<Link>& link) {
        std::lock_guard<std::mutex> guard(lock_);
        links_[link.get()] = link;
        epoll_event event{};
        event.events = EPOLLIN | EPOLLRDHUP;
        event.data.ptr = link.get();
        epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd_, &event);
    }

  private:
    Reader() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
        std::thread([this] { loop(); }).detach();
        // A forked child (of a data loader, say) must not keep the sockets open when this process is killed.
        pthread_atfork(nullptr, nullptr, [] { instance().close_in_child(); });
    }

    void close_in_child() {  // one thread is left, and nobody will unlock what another thread had locked
        for (auto& entry : links_) {
            close(entry.first->fd_);
            entry.first->fd_ = -1;
        }
        close(epoll_);
    }

    void loop() {
        epoll_event events[64];
        for (;;) {
            int n = epoll_wait(epoll_, events, 64, -1);
            for (int i = 0; i < n; i++) {
                std::shared_ptr<Link> link;
                {
                    std::lock_guard<std::mutex> guard(lock_);
                    auto found = links_.find((Link*)events[i].data.ptr);
                    if (found == links_.end()) continue;
                    link = found->second;
                }
                if (link->read_some()) continue;
                epoll_ctl(epoll_, EPOLL_CTL_DEL, link->fd_, nullptr);
                std::lock_guard<std::mutex> guard(lock_);
                links_.erase(link.get());  // the last owner closes the socket
            }
        }
    }

    int epoll_;
    std::mutex lock_;
    std::map<Link*, std::shared_ptr<Link>> links_;
};

void start_reading(const std::shared_ptr<Link>& link) { Reader::instance().add(link); }

// ---- one link -----------------------------------------------------------------------------------------------

Link::~Link() { close(fd_); }

std::string Link::who() const {
    std::string text = "rank " + std::to_string(peer_.rank) + " (";
    if (peer_.world >= 0) text += "RANK " + std::to_string(peer_.world) + ", ";
    return text + "pid " + std::to_string(peer_.pid) + ")";
}

// Read what is there without blocking; several messages if they are small.
bool Link::read_some() {
    for (int turns = 0; turns < 16; turns++) {
        char* at;
        size_t want;
        if (have_ < sizeof(Header)) {
            at = (char*)&partial_.header + have_;
            want = sizeof(Header) - have_;
        } else {
            at = partial_.data.get() + (have_ - sizeof(Header));
            want = partial_.header.bytes - (have_ - sizeof(Header));
        }
        ssize_t n = recv(fd_, at, want, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (n <= 0) {
            std::lock_guard<std::mutex> guard(lock_);
            if (ended_.empty()) ended_ = "has ended or was killed";
            changed_.notify_all();
            return false;
        }
        have_ += (size_t)n;
        if (have_ == sizeof(Header)) {
            if (partial_.header.magic != MAGIC) {
                std::lock_guard<std::mutex> guard(lock_);
                ended_ = "sent something that is no message";
                changed_.notify_all();
                return false;
            }
            if (partial_.header.kind == DATA && partial_.header.bytes)
                partial_.data.reset(new char[partial_.header.bytes]);
        }
        size_t body = partial_.header.kind == DATA ? partial_.header.bytes : 0;
        if (have_ >= sizeof(Header) && have_ == sizeof(Header) + body) file_away();
    }
    return true;
}

void Link::file_away() {
    std::lock_guard<std::mutex> guard(lock_);
    const Header h = partial_.header;
    if (h.kind == DATA)
        inbox_[h.channel][h.serial] = std::move(partial_);
    else if (h.kind == TAKEN)
        acknowledged_[h.channel][h.serial] = true;
    else if (h.kind == GOODBYE)
        ended_ = "has destroyed its communicator";
    partial_ = Message();
    have_ = 0;
    changed_.notify_all();
}

void Link::send(const Header& header, const void* data, Deadline deadline) {
    Header h = header;
    h.magic = MAGIC;
    iovec pieces[2] = {{&h, sizeof h}, {const_cast<void*>(data), h.kind == DATA ? h.bytes : 0}};
    size_t total = sizeof h + pieces[1].iov_len, done = 0;
    std::lock_guard<std::mutex> guard(write_);  // whole messages only
    while (done < total) {
        msghdr m{};
        iovec rest[2];
        for (int i = 0; i < 2; i++) {
            size_t before = i ? sizeof h : 0, skip = done > before ? std::min(done - before, pieces[i].iov_len) : 0;
            rest[i] = {(char*)pieces[i].iov_base + skip, pieces[i].iov_len - skip};
        }
        m.msg_iov = rest;
        m.msg_iovlen = 2;
        ssize_t n = sendmsg(fd_, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            done += (size_t)n;
            continue;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN)
            throw Failure(
                E_REMOTE,
                who() + " can no longer be reached: it has ended, was killed, or has destroyed its communicator");
        if (Clock::now() >= deadline) throw Failure(E_TIMEOUT, who() + " takes no bytes off the wire (is it stopped?)");
        pollfd p{fd_, POLLOUT, 0};
        poll(&p, 1, milliseconds_left(deadline));
        std::lock_guard<std::mutex> state(lock_);
        if (interrupted_) throw Failure(E_REMOTE, "this rank has destroyed the communicator");
    }
}

bool Link::take(Channel channel, uint64_t serial, Message& into, Deadline deadline) {
    std::unique_lock<std::mutex> guard(lock_);
    auto& box = inbox_[channel];
    while (!box.count(serial)) {
        check_open("nothing more can come from it");
        if (Clock::now() >= deadline) return false;
        changed_.wait_until(guard, deadline);
    }
    into = std::move(box[serial]);
    box.erase(serial);
    return true;
}

bool Link::taken(Channel channel, uint64_t serial, Deadline deadline) {
    std::unique_lock<std::mutex> guard(lock_);
    auto& box = acknowledged_[channel];
    while (!box.count(serial)) {
        check_open("it never took the message");
        if (Clock::now() >= deadline) return false;
        changed_.wait_until(guard, deadline);
    }
    box.erase(serial);
    return true;
}

void Link::check_open(const char* doing) const {
    if (interrupted_) throw Failure(E_REMOTE, "this rank has destroyed the communicator");
    if (!ended_.empty()) throw Failure(E_REMOTE, who() + " " + ended_ + ": " + doing);
}

void Link::goodbye() {
    Header h{};
    h.kind = GOODBYE;
    try {
        send(h, nullptr, Clock::now() + std::chrono::seconds(1));
    } catch (const Failure&) {}  // it may be gone already
    shutdown(fd_, SHUT_WR);
}

void Link::interrupt() {
    std::lock_guard<std::mutex> guard(lock_);
    interrupted_ = true;
    changed_.notify_all();
}

std::string Link::waiting() const {
    std::lock_guard<std::mutex> guard(lock_);
    size_t p2p = inbox_[P2P].size(), parts = inbox_[COLLECTIVE].size();
    if (!p2p && !parts) return "nothing of it is waiting here";
    return std::to_string(p2p) + " point-to-point messages and " + std::to_string(parts) +
           " parts of collectives of it are waiting here, untaken";
}

}  // namespace host_hccl
