// NcclApi: the functions of NCCL that we call, typed from nccl.h and found in the library at run
// time.
//
// Only transport/nccl includes this. Optional members are null in libraries that lack them; the
// others have been there since 2.14.
#ifndef ZEROSHARD_TRANSPORT_NCCL_API_H_
#define ZEROSHARD_TRANSPORT_NCCL_API_H_

#include <nccl.h>

namespace zeroshard {

struct NcclApi {
  decltype(&ncclGetVersion) GetVersion = nullptr;
  decltype(&ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&ncclGetErrorString) GetErrorString = nullptr;
  decltype(&ncclGetLastError) GetLastError = nullptr;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&ncclCommFinalize) CommFinalize = nullptr;
  decltype(&ncclCommDestroy) CommDestroy = nullptr;
  decltype(&ncclCommAbort) CommAbort = nullptr;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&ncclGroupStart) GroupStart = nullptr;
  decltype(&ncclGroupEnd) GroupEnd = nullptr;
  decltype(&ncclAllGather) AllGather = nullptr;
  decltype(&ncclBroadcast) Broadcast = nullptr;
  decltype(&ncclSend) Send = nullptr;
  decltype(&ncclRecv) Recv = nullptr;

  // Optional.
  decltype(&ncclCommSplit) CommSplit = nullptr;            // 2.18
  decltype(&ncclCommRegister) CommRegister = nullptr;      // 2.19
  decltype(&ncclCommDeregister) CommDeregister = nullptr;  // 2.19
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_API_H_
