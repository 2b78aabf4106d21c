// Links between ranks: one Unix socket per (communicator, pair of ranks), read by one thread of the process.
//
// The reading thread empties every socket into the mailboxes of its link at once, so a write never waits for the
// peer's tasks, only for its reading thread. Who sends first and who receives first can therefore not dead-lock the
// transport itself; HOST_HCCL_SYNC=1 adds the waiting that real hardware may do (see hccl_work.cpp).
// The sockets have abstract names (no file), and the kernel closes them when a process ends in whatever way: a peer
// that is killed is seen at once as the end of the stream.
#ifndef HOST_HCCL_LINK_H
#define HOST_HCCL_LINK_H

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace host_hccl {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Results of the real library (hccl_types.h in torch_npu's include folder).
enum Result {
    SUCCESS = 0,
    E_PARA = 1,
    E_PTR = 2,
    E_NOT_SUPPORT = 5,
    E_TIMEOUT = 9,
    E_TCP_CONNECT = 11,
    E_TRANSFER = 13,
    E_REMOTE = 21
};

struct Failure : std::runtime_error {
    Failure(int code, const std::string& text) : std::runtime_error(text), code(code) {}
    int code;
};

// Point-to-point messages and parts of collectives are counted apart.
enum Channel : uint8_t { P2P = 0, COLLECTIVE = 1, CHANNELS = 2 };

// DATA carries a message; TAKEN says that the receiver's task has it; GOODBYE, that the communicator was destroyed.
enum Kind : uint8_t { DATA = 1, TAKEN = 2, GOODBYE = 3 };

struct Header {
    uint32_t magic;
    uint8_t kind;  // Kind
    uint8_t channel;
    uint8_t call;     // which entry point sent it (hccl_work.h), so that unlike calls are told apart
    uint8_t type;     // data type
    uint64_t serial;  // number of the message in its channel and direction
    uint64_t bytes;
};

struct Message {
    Header header{};
    std::unique_ptr<char[]> data;
};

struct Peer {  // what the ranks tell each other when they connect
    uint32_t rank, size;
    int32_t world, pid;  // world: the environment's RANK, -1 if not set
};

class Link {
  public:
    Link(int fd, const Peer& peer) : fd_(fd), peer_(peer) {}
    ~Link();

    void send(const Header& header, const void* data, Deadline deadline);
    // Wait for message `serial` of a channel; false when the deadline passes.
    // Throws Failure when the peer is gone and the message can no longer come.
    bool take(Channel channel, uint64_t serial, Message& into, Deadline deadline);
    // Wait until the peer's task has taken message `serial`; as take.
    bool taken(Channel channel, uint64_t serial, Deadline deadline);
    void goodbye();    // tell the peer and stop sending
    void interrupt();  // wake all waiters: the communicator is being destroyed
    int world() const { return peer_.world; }
    std::string who() const;      // "rank 1 (RANK 3, pid 77)"
    std::string waiting() const;  // what has arrived and nobody took, for messages

  private:
    friend class Reader;
    bool read_some();  // by the reading thread; false at the end of the stream
    void file_away();
    void check_open(const char* doing) const;

    int fd_;
    Peer peer_;
    std::mutex write_;
    mutable std::mutex lock_;
    std::condition_variable changed_;
    std::map<uint64_t, Message> inbox_[CHANNELS];
    std::map<uint64_t, bool> acknowledged_[CHANNELS];
    std::string ended_;  // why nothing more will come; empty while the link lives
    bool interrupted_ = false;
    Message partial_;  // the message being read
    size_t have_ = 0;  // its bytes so far, header included
};

// Hands a link to the reading thread.
void start_reading(const std::shared_ptr<Link>& link);

// Connects `rank` with all other ranks that use the same identifier; blocks until all are there.
// links[rank] stays empty. Throws Failure when the deadline passes, naming the ranks that are missing.
std::vector<std::shared_ptr<Link>> connect_all(const std::string& id, uint32_t rank, uint32_t size, Deadline deadline,
                                               double seconds);

std::string random_identifier();

int milliseconds_left(Deadline deadline);  // for poll: at most a second, so that nothing sleeps past an event

}  // namespace host_hccl
#endif
