// Makes device memory as a worker does and gives its descriptor away; ends only when it is killed.
//
// Arguments: the descriptor of a SOCK_SEQPACKET, bytes, a byte to fill the memory with. Sends one
// message, "ready" with the memory's descriptor, or what went wrong. Then answers "done" to each
// message: "fill" fills the memory with the next value, "busy" enqueues many fills, each with the
// next value, and waits for none of them.
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/fd_passing.h"
#include "base/status.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kBusyFills = 512;

absl::Status Serve(int socket, uint64_t bytes, uint8_t value) {
  ZS_ASSIGN_OR_RETURN(const auto device, CudaDevice::Open(0));
  ZS_ASSIGN_OR_RETURN(const DeviceMemory memory, DeviceMemory::Create(*device, bytes));
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(*device, StreamPriority::kLow));
  ZS_RETURN_IF_ERROR(stream.Fill(memory.address(), value++, memory.bytes()));
  ZS_RETURN_IF_ERROR(stream.Synchronize(kPatience));
  ZS_ASSIGN_OR_RETURN(const UniqueFd fd, memory.Export());
  const int fds[] = {fd.get()};
  ZS_RETURN_IF_ERROR(SendMessage(socket, "ready", fds, kPatience));
  while (true) {
    ZS_ASSIGN_OR_RETURN(const Message request, ReceiveMessage(socket, kPatience));
    const bool busy = request.bytes == "busy";
    for (int i = 0; i < (busy ? kBusyFills : 1); ++i) {
      ZS_RETURN_IF_ERROR(stream.Fill(memory.address(), value++, memory.bytes()));
    }
    if (!busy) ZS_RETURN_IF_ERROR(stream.Synchronize(kPatience));
    ZS_RETURN_IF_ERROR(SendMessage(socket, "done", {}, kPatience));
  }
}

}  // namespace
}  // namespace zeroshard

int main(int count, char** arguments) {
  if (count != 4) return 2;
  const int socket = atoi(arguments[1]);
  const absl::Status status = zeroshard::Serve(socket, strtoull(arguments[2], nullptr, 10),
                                               static_cast<uint8_t>(atoi(arguments[3])));
  zeroshard::SendMessage(socket, std::string(status.message()), {}, zeroshard::kPatience)
      .IgnoreError();
  return 1;
}
