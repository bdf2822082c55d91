#include "tests/fakes/cuda/physical.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/fakes/cuda/errors.h"

namespace zeroshard::fake_cuda {
namespace {

constexpr uint64_t kTrailerBytes = 4096;
constexpr char kMagic[8] = {'Z', 'S', 'F', 'A', 'K', 'E', 'V', 'M'};

// Behind the memory in its file, for those who import it.
struct Trailer {
  char magic[8];
  int device;
  uint64_t bytes;
  CUmemAllocationProp prop;
};

std::string Errno(const std::string& what) { return what + ": " + std::strerror(errno); }

void Fill(int fd, uint64_t bytes, int byte) {
  void* const map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) Die(Errno("cannot map device memory"));
  std::memset(map, byte, bytes);
  munmap(map, bytes);
}

// Holds the node's lock file, so that a process sees whole files only.
class NodeLock {
 public:
  explicit NodeLock(int fd) : fd_(fd) {
    if (fd_ >= 0 && flock(fd_, LOCK_EX) != 0) Die(Errno("cannot lock the node's directory"));
  }
  ~NodeLock() {
    if (fd_ >= 0) flock(fd_, LOCK_UN);
  }

 private:
  const int fd_;
};

bool IsDead(int witness) {
  if (flock(witness, LOCK_EX | LOCK_NB) != 0) return false;
  flock(witness, LOCK_UN);
  return true;
}

std::string Prefix(int device) { return "device-" + std::to_string(device) + "-"; }

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

int Physical::DuplicateFd() const { return fcntl(fd.get(), F_DUPFD_CLOEXEC, 3); }

Pool::Pool(const Settings& settings)
    : memory_(settings.memory), poison_(settings.poison), node_(settings.node) {
  if (node_.empty()) return;
  if (mkdir(node_.c_str(), 0777) != 0 && errno != EEXIST) Die(Errno("cannot make " + node_));
  node_lock_ = Fd(open((node_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!node_lock_.valid()) Die(Errno("cannot open " + node_ + "/lock"));
}

Fd Pool::NewFile(int device, uint64_t bytes) {
  if (node_.empty()) {
    Fd fd(memfd_create("fake-cuda", MFD_CLOEXEC));
    if (!fd.valid()) Die(Errno("memfd_create"));
    const std::string self = "/proc/self/fd/" + std::to_string(fd.get());
    Fd witness(open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!witness.valid()) Die(Errno("cannot open " + self));
    witnesses_.push_back({std::move(witness), device, bytes});
    return fd;
  }
  const std::string path =
      node_ + "/" + Prefix(device) + std::to_string(getpid()) + "-" + std::to_string(files_++);
  Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.valid()) Die(Errno("cannot make " + path));
  return fd;
}

std::shared_ptr<Physical> Pool::Create(int device, uint64_t bytes, const CUmemAllocationProp& prop,
                                       CUresult* error) {
  std::lock_guard<std::mutex> lock(mu_);
  NodeLock node_lock(node_lock_.get());
  *error = CUDA_ERROR_OUT_OF_MEMORY;
  if (bytes > memory_ || UsedLocked(device) > memory_ - bytes) return nullptr;
  auto memory = std::make_shared<Physical>();
  memory->fd = NewFile(device, bytes);
  memory->device = device;
  memory->bytes = bytes;
  memory->prop = prop;
  const int fd = memory->fd.get();
  Trailer trailer = {};
  std::memcpy(trailer.magic, kMagic, sizeof(kMagic));
  trailer.device = device;
  trailer.bytes = bytes;
  trailer.prop = prop;
  if (flock(fd, LOCK_EX) != 0) Die(Errno("cannot lock device memory"));
  if (ftruncate(fd, static_cast<off_t>(bytes + kTrailerBytes)) != 0 ||
      pwrite(fd, &trailer, sizeof(trailer), static_cast<off_t>(bytes)) != sizeof(trailer)) {
    Die(Errno("cannot make device memory of " + std::to_string(bytes) + " bytes"));
  }
  if (poison_) Fill(fd, bytes, 0xcd);
  *error = CUDA_SUCCESS;
  return memory;
}

std::shared_ptr<Physical> Pool::Import(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0 || info.st_size <= static_cast<off_t>(kTrailerBytes)) return nullptr;
  const auto bytes = static_cast<uint64_t>(info.st_size) - kTrailerBytes;
  Trailer trailer = {};
  if (pread(fd, &trailer, sizeof(trailer), static_cast<off_t>(bytes)) != sizeof(trailer)) {
    return nullptr;
  }
  if (std::memcmp(trailer.magic, kMagic, sizeof(kMagic)) != 0 || trailer.bytes != bytes) {
    return nullptr;
  }
  auto memory = std::make_shared<Physical>();
  memory->fd = Fd(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!memory->fd.valid()) return nullptr;
  memory->device = trailer.device;
  memory->bytes = bytes;
  memory->prop = trailer.prop;
  return memory;
}

uint64_t Pool::Used(int device) {
  std::lock_guard<std::mutex> lock(mu_);
  NodeLock node_lock(node_lock_.get());
  return UsedLocked(device);
}

uint64_t Pool::UsedLocked(int device) {
  if (!node_.empty()) return UsedOfNode(device);
  uint64_t used = 0;
  std::erase_if(witnesses_, [](const Witness& witness) { return IsDead(witness.fd.get()); });
  for (const Witness& witness : witnesses_) {
    if (witness.device == device) used += witness.bytes;
  }
  return used;
}

// Sums the files whose memory is alive and removes the others.
uint64_t Pool::UsedOfNode(int device) {
  DIR* const directory = opendir(node_.c_str());
  if (directory == nullptr) Die(Errno("cannot list " + node_));
  uint64_t used = 0;
  const std::string prefix = Prefix(device);
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.rfind(prefix, 0) != 0) continue;
    const std::string path = node_ + "/" + name;
    const Fd witness(open(path.c_str(), O_RDWR | O_CLOEXEC));
    struct stat info;
    if (!witness.valid() || fstat(witness.get(), &info) != 0) continue;
    if (IsDead(witness.get())) {
      unlink(path.c_str());
    } else {
      used += static_cast<uint64_t>(info.st_size) - std::min<uint64_t>(info.st_size, kTrailerBytes);
    }
  }
  closedir(directory);
  return used;
}

}  // namespace zeroshard::fake_cuda
