// DescriptorServer: hands the descriptors of a rank's regions to whoever presents its token.
//
//   client -> server   32 bytes: AttachReply.token
//   server -> client   "ok" with the descriptors in the order of AttachReply.regions
//                      or "error: <text>" without
//
// One exchange a connection, on a SOCK_SEQPACKET socket. Lives on the decision thread; connections
// that say nothing are closed after kPatience.

#ifndef ZEROSHARD_SERVER_DESCRIPTOR_SERVER_H_
#define ZEROSHARD_SERVER_DESCRIPTOR_SERVER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "server/event_loop.h"
#include "server/job_table.h"

namespace zeroshard {

class DescriptorServer {
 public:
  // Takes over a listening socket. The others outlive this object.
  DescriptorServer(EventLoop* loop, JobTable* table, UniqueFd listener,
                   std::vector<uint32_t> allow_uids);
  ~DescriptorServer();

  absl::Status Start();

 private:
  struct Connection {
    UniqueFd socket;
    uint64_t timer = 0;
  };
  void OnConnection();
  void OnToken(int fd);
  void Close(int fd);

  EventLoop* const loop_;
  JobTable* const table_;
  const UniqueFd listener_;
  const std::vector<uint32_t> allow_uids_;
  std::map<int, Connection> connections_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DESCRIPTOR_SERVER_H_
