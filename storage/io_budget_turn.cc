// TryTake, Give and Withdraw: whose turn it is at a device. docs/io_budget.md has the rules and why
// they are fair, bounded and safe against kills.
#include <algorithm>
#include <array>
#include <limits>

#include "storage/io_budget.h"
#include "storage/io_budget_page.h"

namespace zeroshard {
namespace {

using Page = IoBudgetPage;
using Flow = IoBudgetPage::Flow;

const int64_t kBurstNanos = absl::ToInt64Nanoseconds(IoBudget::kBurst);
const int64_t kGraceNanos = absl::ToInt64Nanoseconds(IoBudget::kGrace);
const int64_t kPatienceNanos = absl::ToInt64Nanoseconds(IoBudget::kPatience);
const int64_t kMaxWaitNanos = absl::ToInt64Nanoseconds(IoBudget::kMaxWait);
// How soon to look again when it is another holder that must act first.
constexpr int64_t kPollNanos = 500'000;

constexpr double kNanosASecond = 1e9;
constexpr double kNanosADay = 86400e9;

// Who has been asking lately.
struct Active {
  uint32_t count = 0;
  uint32_t jobs = 0;
  std::array<uint16_t, IoBudget::kMaxHolders> holder;
  std::array<uint64_t, IoBudget::kMaxHolders> job;

  void Add(uint32_t h, uint64_t its_job) {
    jobs += WorkersOf(its_job) == 0;
    holder[count] = static_cast<uint16_t>(h);
    job[count++] = its_job;
  }
  uint32_t WorkersOf(uint64_t its_job) const {
    return static_cast<uint32_t>(std::count(job.begin(), job.begin() + count, its_job));
  }
};

struct Request {
  uint32_t device = 0;
  uint32_t holder = 0;
  uint64_t bytes = 0;
  IoDirection direction = IoDirection::kRead;
};

// One call of TryTake.
class Turn {
 public:
  Turn(Page& page, const Request& request, int64_t now, int64_t day,
       const std::function<void()>& observer)
      : page_(page),
        device_(page.device[request.device]),
        slot_(device_.slot[request.holder]),
        holder_(request.holder),
        direction_(static_cast<uint32_t>(request.direction)),
        flow_(slot_.flow[direction_]),
        bytes_(request.bytes),
        now_(now),
        day_(day),
        observer_(observer),
        rate_(device_.bytes_per_second.load()) {
    const uint64_t budget = device_.write_budget.load();
    const uint64_t written = AddToDay(UnpackDay(device_.today.load()), day, 0).written;
    if (budget > 0 && written >= budget) slowed_nanos_a_byte_ = kNanosADay / budget;
  }

  IoTurn Take() {
    // A want that was given up long ago is not this one.
    const int64_t stale = kMaxWaitNanos;
    const bool waited =
        flow_.waits.load() != Page::kForNothing && flow_.active_until.load() + stale >= now_;
    since_ = waited ? flow_.since.load() : now_;
    const uint32_t depth = std::min(device_.depth.load(), IoBudget::kMaxDepth);
    const bool slowed_write = slowed_nanos_a_byte_ > 0 && IsWrite();
    if (depth > 0 || rate_ > 0 || slowed_write) {
      FindActive();
      std::atomic<uint16_t>* token = nullptr;
      if (depth > 0 && !TakeToken(depth, &token)) return Refuse(Page::kForDepth, kPollNanos);
      const int64_t wait = rate_ > 0 || slowed_write ? Pay(slowed_write) : 0;
      if (wait > 0) {
        if (token != nullptr) Store(*token, uint16_t{0});
        return Refuse(Page::kForRate, wait);
      }
    }
    Count();
    return {.granted = true, .wait = absl::ZeroDuration()};
  }

 private:
  bool IsWrite() const { return direction_ == static_cast<uint32_t>(IoDirection::kWrite); }

  template <typename T>
  void Store(std::atomic<T>& word, T value) {
    word.store(value);
    if (observer_) observer_();
  }
  template <typename T>
  void Add(std::atomic<T>& word, T value) {
    word.fetch_add(value);
    if (observer_) observer_();
  }

  uint64_t JobOf(uint32_t holder) const {
    return page_.holder[holder].job.load(std::memory_order_relaxed);
  }

  void FindActive() {
    const uint32_t holders = page_.holders.load();
    for (uint32_t h = 0; h < holders; ++h) {
      const Page::Slot& other = device_.slot[h];
      const int64_t until =
          std::max(other.flow[0].active_until.load(), other.flow[1].active_until.load());
      if (h == holder_ || (until >= now_ && until != 0)) active_.Add(h, JobOf(h));
    }
  }

  // Tokens of the depth that a holder may always have.
  uint32_t ShareOf(uint64_t job, uint32_t depth) const {
    return std::max(1u, depth / active_.jobs / std::max(1u, active_.WorkersOf(job)));
  }

  bool IsWaiting(const Flow& flow, Page::Waits why) const {
    return flow.waits.load() == why && flow.active_until.load() >= now_;
  }

  // A token of the depth for this transfer. True with none for one beyond the depth.
  bool TakeToken(uint32_t depth, std::atomic<uint16_t>** token) {
    std::array<uint16_t, IoBudget::kMaxHolders + 1> taken = {};
    for (uint32_t i = 0; i < depth; ++i) {
      ++taken[std::min<uint32_t>(device_.token[i].load(), IoBudget::kMaxHolders)];
    }
    if (taken[0] > 0 && MayTake(taken, depth)) {
      const auto mine = static_cast<uint16_t>(holder_ + 1);
      for (uint32_t i = 0; i < depth; ++i) {
        uint16_t free = 0;
        if (device_.token[i].load() != 0) continue;
        if (!device_.token[i].compare_exchange_strong(free, mine)) continue;
        if (observer_) observer_();
        *token = &device_.token[i];
        return true;
      }
    }
    if (taken[holder_ + 1] > 0 || now_ - since_ < kPatienceNanos) return false;
    overdraft_ = true;
    return true;
  }

  // Within its share always; beyond it only what those who are below theirs do not wait for.
  bool MayTake(const std::array<uint16_t, IoBudget::kMaxHolders + 1>& taken, uint32_t depth) const {
    if (taken[holder_ + 1] < ShareOf(JobOf(holder_), depth)) return true;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < active_.count; ++i) {
      const uint32_t h = active_.holder[i];
      const Page::Slot& other = device_.slot[h];
      const bool waits =
          IsWaiting(other.flow[0], Page::kForDepth) || IsWaiting(other.flow[1], Page::kForDepth);
      kept += h != holder_ && waits && taken[h + 1] < ShareOf(active_.job[i], depth);
    }
    return taken[0] > kept;
  }

  int64_t Cost(uint64_t bytes) const {
    if (rate_ == 0) return 0;
    return static_cast<int64_t>(static_cast<double>(bytes) * kNanosASecond / rate_) + 1;
  }

  // Bytes of those who wait for the rate, could go now, and come before this transfer: in the order
  // of virtual start, then of asking.
  uint64_t BytesAhead(uint64_t virtual_time, bool writes_may_go) const {
    const uint64_t start = std::max(virtual_time, slot_.finish.load());
    uint64_t ahead = 0;
    for (uint32_t i = 0; i < active_.count; ++i) {
      const uint32_t h = active_.holder[i];
      const Page::Slot& other = device_.slot[h];
      const uint64_t its_start = std::max(virtual_time, other.finish.load());
      for (uint32_t d = 0; d < (writes_may_go ? 2 : 1); ++d) {
        const Flow& flow = other.flow[d];
        if (&flow == &flow_ || !IsWaiting(flow, Page::kForRate)) continue;
        const std::array<uint64_t, 3> its = {its_start, static_cast<uint64_t>(flow.since.load()),
                                             h * 2 + d};
        const std::array<uint64_t, 3> mine = {start, static_cast<uint64_t>(since_),
                                              holder_ * 2 + direction_};
        if (its < mine) ahead += std::max<uint64_t>(1, flow.wanted.load());
      }
    }
    return ahead;
  }

  // Raises `paid_until` by `cost` unless it lies in the future; returns how far it does.
  int64_t PayOne(std::atomic<int64_t>& paid_until, int64_t cost, int64_t credit) {
    int64_t paid = paid_until.load();
    do {
      if (paid > now_) return paid - now_;
    } while (!paid_until.compare_exchange_weak(paid, std::max(paid, now_ - credit) + cost));
    if (observer_) observer_();
    return 0;
  }

  // Pays for the transfer and returns 0, or how long to wait.
  int64_t Pay(bool slowed_write) {
    const uint64_t virtual_time = device_.virtual_time.load();
    const int64_t write_wait = device_.write_paid_until.load() - now_;
    const bool slowed = slowed_nanos_a_byte_ > 0;
    const uint64_t ahead = BytesAhead(virtual_time, !slowed || write_wait <= 0);
    if (slowed_write && write_wait > 0) return write_wait;
    if (ahead > 0) {
      const int64_t rate_wait = rate_ > 0 ? device_.paid_until.load() - now_ : 0;
      return std::max(kPollNanos, rate_wait + Cost(ahead));
    }
    const int64_t cost = Cost(bytes_);
    if (rate_ > 0) {
      const int64_t wait = PayOne(device_.paid_until, cost, kBurstNanos);
      if (wait > 0) return wait;
    }
    if (slowed_write) {
      const int64_t wait =
          PayOne(device_.write_paid_until, static_cast<int64_t>(bytes_ * slowed_nanos_a_byte_), 0);
      if (wait > 0) {
        if (rate_ > 0) Add(device_.paid_until, -cost);
        return wait;
      }
    }
    const uint64_t start = std::max(virtual_time, slot_.finish.load());
    Store(slot_.finish, start + bytes_ * active_.WorkersOf(JobOf(holder_)));
    uint64_t before = device_.virtual_time.load();
    while (before < start && !device_.virtual_time.compare_exchange_weak(before, start)) {
    }
    if (observer_) observer_();
    return 0;
  }

  IoTurn Refuse(Page::Waits why, int64_t wait) {
    wait = std::clamp(wait, int64_t{1}, kMaxWaitNanos);
    Store(flow_.since, since_);
    Store(flow_.wanted, bytes_);
    Store(flow_.active_until, now_ + wait + kGraceNanos);
    Store(flow_.waits, static_cast<uint32_t>(why));
    return {.granted = false, .wait = absl::Nanoseconds(wait)};
  }

  void Count() {
    if (IsWrite()) {
      uint64_t before = device_.today.load();
      while (!device_.today.compare_exchange_weak(
          before, PackDay(AddToDay(UnpackDay(before), day_, bytes_)))) {
      }
      if (observer_) observer_();
    }
    Add(device_.bytes[direction_], bytes_);
    Add(slot_.bytes[direction_], bytes_);
    if (now_ > since_) Add(device_.wait_nanos, static_cast<uint64_t>(now_ - since_));
    if (overdraft_) Add(device_.overdrafts, uint64_t{1});
    Store(flow_.active_until, now_ + kGraceNanos);
    if (flow_.waits.load() != Page::kForNothing) Store(flow_.waits, uint32_t{Page::kForNothing});
  }

  Page& page_;
  Page::Device& device_;
  Page::Slot& slot_;
  const uint32_t holder_;
  const uint32_t direction_;
  Flow& flow_;
  const uint64_t bytes_;
  const int64_t now_;
  const int64_t day_;
  const std::function<void()>& observer_;
  const uint64_t rate_;
  double slowed_nanos_a_byte_ = 0;  // 0 while writes are not slowed
  int64_t since_ = 0;
  bool overdraft_ = false;
  Active active_;
};

}  // namespace

IoTurn IoBudget::TryTake(uint32_t device, uint32_t holder, uint64_t bytes,
                         IoDirection direction) const {
  const Request request = {device, holder, bytes, direction};
  return Turn(*page_, request, NowNanos(), Today(), observer_).Take();
}

void IoBudget::Give(uint32_t device, uint32_t holder) const {
  IoBudgetPage::Device& from = page_->device[device];
  const uint32_t tokens = std::min(from.tokens.load(), kMaxDepth);
  for (uint32_t i = 0; i < tokens; ++i) {
    if (from.token[i].load() != holder + 1) continue;
    from.token[i].store(0);
    if (observer_) observer_();
    return;
  }
}

void IoBudget::Withdraw(uint32_t device, uint32_t holder, IoDirection direction) const {
  Flow& flow = page_->device[device].slot[holder].flow[static_cast<uint32_t>(direction)];
  flow.waits.store(Page::kForNothing);
  flow.active_until.store(0);
}

}  // namespace zeroshard
