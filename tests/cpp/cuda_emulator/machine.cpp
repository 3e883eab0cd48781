#include "cuda_emulator/machine.h"

#include <algorithm>
#include <exception>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <sstream>
#include <vector>

#include "cuda_emulator/async_copies.h"
#include "cuda_emulator/device_variables.h"
#include "cuda_emulator/fiber.h"
#include "cuda_emulator/schedule.h"
#include "cuda_emulator/shared_block.h"

namespace tinyserve::cuda::emulator {
namespace {

constexpr unsigned kLanes = 32;

bool same_site(const Site& a, const Site& b) {
  return a.where.line() == b.where.line() && a.where.column() == b.where.column() &&
         std::strcmp(a.operation, b.operation) == 0 &&
         std::strcmp(a.where.file_name(), b.where.file_name()) == 0;
}

std::ostream& operator<<(std::ostream& out, const Site& site) {
  return out << site.operation << " at " << site.where.file_name() << ":" << site.where.line();
}

std::ostream& operator<<(std::ostream& out, const uint3& index) {
  return out << "(" << index.x << ", " << index.y << ", " << index.z << ")";
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

struct Hex {
  unsigned mask;
};
std::ostream& operator<<(std::ostream& out, Hex hex) {
  return out << "0x" << std::hex << hex.mask << std::dec;
}

struct Block;

struct Thread {
  Fiber* fiber = nullptr;
  Block* block = nullptr;
  uint3 index = {};
  unsigned number = 0;  // in the block
  bool exited = false;
  Site waits_at = {};
  int barrier_sum = 0;
  AsyncCopies copies;

  unsigned warp() const { return number / kLanes; }
  unsigned lane() const { return number % kLanes; }
};

// Threads that wait for all others of a block or cluster.
struct Barrier {
  size_t num_threads = 0;
  size_t num_exited = 0;
  std::vector<Thread*> waiting;
  int sum = 0;
};

// A warp collective under way.
struct Exchange {
  Site site;
  unsigned mask;
  unsigned arrived = 0;
  std::vector<Thread*> waiting = {};
  std::shared_ptr<LaneValues> values = std::make_shared_for_overwrite<LaneValues>();
};

struct Warp {
  unsigned live = 0;  // lanes that exist and have not exited
  std::vector<Exchange> exchanges;
};

struct Block {
  uint3 index = {};
  unsigned rank = 0;  // in the cluster
  SharedBlock shared;
  std::vector<Thread> threads;
  Barrier barrier;
  std::vector<Warp> warps;

  explicit Block(size_t shared_bytes) : shared(shared_bytes) {}
};

// Unwinds the threads that are left after an error.
struct Cancelled {};

// Stacks are kept for the next block and the next launch.
std::vector<std::unique_ptr<Fiber>>& fibers() {
  thread_local std::vector<std::unique_ptr<Fiber>> pool;
  return pool;
}

thread_local Schedule schedule_of_launches;

// Blocks that run at the same time, and the one place that decides who runs next.
class Cluster {
 public:
  Cluster(const LaunchConfig& config, const std::vector<uint3>& block_indices,
          const std::function<void()>& body, const Schedule& schedule, std::mt19937_64& random)
      : body_(body), schedule_(schedule), random_(random) {
    const unsigned block_threads = config.block.x * config.block.y * config.block.z;
    barrier_.num_threads = block_threads * block_indices.size();
    while (fibers().size() < barrier_.num_threads) fibers().push_back(std::make_unique<Fiber>());
    for (const uint3& index : block_indices) {
      Block& block = *blocks_.emplace_back(std::make_unique<Block>(config.shared_bytes));
      block.index = index;
      block.rank = static_cast<unsigned>(blocks_.size() - 1);
      block.barrier.num_threads = block_threads;
      block.warps.resize((block_threads + kLanes - 1) / kLanes);
      block.threads.resize(block_threads);
      for (unsigned i = 0; i < block_threads; ++i) {
        Thread& thread = block.threads[i];
        thread.block = &block;
        thread.number = i;
        block.warps[thread.warp()].live |= 1U << thread.lane();
        thread.index = {i % config.block.x, i / config.block.x % config.block.y,
                        i / (config.block.x * config.block.y)};
        thread.fiber = fibers()[block.rank * block_threads + i].get();
        thread.fiber->set_work([this, &thread] { run_thread(thread); });
        make_ready(thread);
      }
    }
  }

  void run() {
    // A thread that waits this often in one launch is caught in a loop.
    const size_t max_turns = 20000 * barrier_.num_threads;
    for (size_t turn = 0; !ready_.empty() && !error_; ++turn) {
      Thread& thread = *ready_.top().thread;
      if (turn == max_turns) {
        error_ = std::make_exception_ptr(KernelError(describe_wait("livelock: threads wait on and on")));
        break;
      }
      ready_.pop();
      resume(thread);
    }
    if (!error_ && barrier_.num_exited != barrier_.num_threads) {
      error_ = std::make_exception_ptr(KernelError(describe_wait("deadlock: no thread can go on")));
    }
    if (!error_) {
      for (const auto& block : blocks_) check_shared(*block, "at the end of the block");
    }
    if (error_) {
      cancel_the_rest();
      std::rethrow_exception(error_);
    }
  }

  Thread* running = nullptr;

  [[noreturn]] void fail_in(const Thread& thread, const std::string& what) const {
    throw KernelError(text("block ", thread.block->index, ", thread ", thread.index, " (warp ", thread.warp(),
                           ", lane ", thread.lane(), "): ", what));
  }

  // Gives the turn away; who calls must have seen to it that the thread becomes ready again.
  void wait() {
    running->fiber->suspend();
    if (cancelling_) throw Cancelled{};
  }

  void make_ready(Thread& thread) {
    const uint64_t number = thread.block->rank * thread.block->barrier.num_threads + thread.number;
    switch (schedule_.order) {
      case Schedule::Order::kAscending:
        return ready_.push({number, &thread});
      case Schedule::Order::kDescending:
        return ready_.push({~number, &thread});
      case Schedule::Order::kShuffled:
        return ready_.push({random_(), &thread});
    }
  }

  bool shuffled() const { return schedule_.order == Schedule::Order::kShuffled; }
  Barrier& barrier() { return barrier_; }
  std::vector<std::unique_ptr<Block>>& blocks() { return blocks_; }

  int wait_at_barrier(Barrier& barrier, const Site& site, int value, const char* group) {
    Thread& thread = *running;
    if (barrier.num_exited != 0) {
      fail_in(thread, text(site, ": expected all ", barrier.num_threads, " threads of the ", group, ", but ",
                           barrier.num_exited, " have exited"));
    }
    if (!barrier.waiting.empty() && !same_site(barrier.waiting.front()->waits_at, site)) {
      const Thread& first = *barrier.waiting.front();
      fail_in(thread, text("expected the ", group, "'s threads at one barrier, ", first.waits_at,
                           ", where thread ", first.index, " waits; got ", site));
    }
    thread.waits_at = site;
    barrier.waiting.push_back(&thread);
    barrier.sum += value;
    if (barrier.waiting.size() == barrier.num_threads) {
      for (const auto& block : blocks_) check_shared(*block, text("before ", site));
      for (Thread* waiting : barrier.waiting) {
        waiting->barrier_sum = barrier.sum;
        make_ready(*waiting);
      }
      barrier.waiting.clear();
      barrier.sum = 0;
    }
    wait();
    return thread.barrier_sum;
  }

 private:
  struct Ready {
    uint64_t priority;  // smallest first
    Thread* thread;
    bool operator<(const Ready& other) const { return priority > other.priority; }
  };

  void resume(Thread& thread) {
    running = &thread;
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    thread.fiber->resume();
  }

  void run_thread(Thread& thread) {
    try {
      if (cancelling_) return;
      body_();
      leave(thread);
    } catch (const Cancelled&) {
    } catch (...) {
      error_ = std::current_exception();
    }
    thread.exited = true;
  }

  // A thread that is waited for may not end.
  void leave(Thread& thread) {
    if (thread.copies.under_way()) {
      fail_in(thread, "expected a wait for every cp_async before the end of the kernel, got none");
    }
    Warp& warp = thread.block->warps[thread.warp()];
    warp.live &= ~(1U << thread.lane());
    for (const Exchange& exchange : warp.exchanges) {
      if ((exchange.mask >> thread.lane() & 1U) != 0) {
        fail_in(thread, text("expected at ", exchange.site, " with mask ", Hex{exchange.mask},
                             ", but the kernel has ended for it"));
      }
    }
    for (Barrier* barrier : {&thread.block->barrier, &barrier_}) {
      ++barrier->num_exited;
      if (!barrier->waiting.empty()) {
        fail_in(thread, text("expected at ", barrier->waiting.front()->waits_at,
                             ", where others wait, but the kernel has ended for it"));
      }
    }
  }

  void check_shared(const Block& block, const std::string& when) const {
    if (const std::string damage = block.shared.damage(); !damage.empty()) {
      throw KernelError(text("block ", block.index, ": ", damage, " (seen ", when, ")"));
    }
  }

  std::string describe_wait(const char* what) const {
    std::map<std::string, std::vector<const Thread*>> waiting;
    for (const auto& block : blocks_) {
      for (const Thread& thread : block->threads) {
        if (!thread.exited) waiting[text("block ", block->index, ", ", thread.waits_at)].push_back(&thread);
      }
    }
    std::ostringstream out;
    out << what;
    for (const auto& [place, threads] : waiting) {
      out << "\n  " << place << ": " << threads.size() << " threads, numbers";
      for (size_t i = 0; i < threads.size(); ++i) {
        const size_t first = i;
        while (i + 1 < threads.size() && threads[i + 1]->number == threads[i]->number + 1) ++i;
        out << " " << threads[first]->number;
        if (i != first) out << "-" << threads[i]->number;
      }
    }
    return out.str();
  }

  void cancel_the_rest() {
    cancelling_ = true;
    for (const auto& block : blocks_) {
      for (Thread& thread : block->threads) {
        if (!thread.exited) resume(thread);
      }
    }
  }

  const std::function<void()>& body_;
  const Schedule& schedule_;
  std::mt19937_64& random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  Barrier barrier_;
  std::priority_queue<Ready> ready_;
  std::exception_ptr error_;
  bool cancelling_ = false;
};

thread_local Cluster* current_cluster = nullptr;

Cluster& cluster() {
  if (current_cluster == nullptr) throw KernelError("a device function was called outside of a kernel");
  return *current_cluster;
}

Thread& this_thread() { return *cluster().running; }

void check_config(const LaunchConfig& config, unsigned block_threads) {
  const auto check = [](bool good, const char* expected, uint64_t got) {
    if (!good) throw KernelError(text("launch: expected ", expected, ", got ", got));
  };
  check(block_threads >= 1 && block_threads <= 1024, "1 to 1024 threads in a block", block_threads);
  check(config.grid.x >= 1 && config.grid.x <= INT32_MAX, "grid.x from 1 to 2^31 - 1", config.grid.x);
  check(config.grid.y >= 1 && config.grid.y <= 65535, "grid.y from 1 to 65535", config.grid.y);
  check(config.grid.z >= 1 && config.grid.z <= 65535, "grid.z from 1 to 65535", config.grid.z);
  check(config.shared_bytes <= 227 << 10, "at most 227 KiB of shared memory", config.shared_bytes);
  check(config.cluster_size >= 1 && config.cluster_size <= 8, "1 to 8 blocks in a cluster",
        config.cluster_size);
  check(config.grid.x % config.cluster_size == 0, "a grid.x of whole clusters", config.grid.x);
}

}  // namespace

ScheduleScope::ScheduleScope(Schedule schedule) : before_(schedule_of_launches) {
  schedule_of_launches = schedule;
}
ScheduleScope::~ScheduleScope() { schedule_of_launches = before_; }

void run_grid(const LaunchConfig& config, const std::function<void()>& body) {
  if (current_cluster != nullptr) throw KernelError("launch: expected on the host, got one inside a kernel");
  check_config(config, config.block.x * config.block.y * config.block.z);
  const Schedule schedule = schedule_of_launches;
  std::mt19937_64 random(schedule.seed);
  std::vector<uint64_t> order(uint64_t{config.grid.x} / config.cluster_size * config.grid.y * config.grid.z);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (schedule.order == Schedule::Order::kDescending) std::ranges::reverse(order);
  if (schedule.order == Schedule::Order::kShuffled) std::ranges::shuffle(order, random);
  blockDim = config.block;
  gridDim = config.grid;
  struct Reset {
    ~Reset() { current_cluster = nullptr; }
  } reset;
  for (const uint64_t number : order) {
    const uint64_t clusters_x = config.grid.x / config.cluster_size;
    std::vector<uint3> indices;
    for (unsigned rank = 0; rank < config.cluster_size; ++rank) {
      indices.push_back({static_cast<unsigned>(number % clusters_x * config.cluster_size + rank),
                         static_cast<unsigned>(number / clusters_x % config.grid.y),
                         static_cast<unsigned>(number / clusters_x / config.grid.y)});
    }
    Cluster cluster(config, indices, body, schedule, random);
    current_cluster = &cluster;
    cluster.run();
    current_cluster = nullptr;
  }
}

void fail(const Site& site, const std::string& what) {
  cluster().fail_in(this_thread(), text(site, ": ", what));
}

int block_barrier(const Site& site, int value) {
  return cluster().wait_at_barrier(this_thread().block->barrier, site, value, "block");
}

void cluster_barrier(const Site& site) { cluster().wait_at_barrier(cluster().barrier(), site, 0, "cluster"); }

void may_be_overtaken() {
  if (!cluster().shuffled()) return;
  cluster().make_ready(this_thread());
  cluster().wait();
}

std::shared_ptr<const LaneValues> exchange(const Site& site, unsigned mask, const void* value, size_t bytes) {
  Thread& thread = this_thread();
  const unsigned lane_bit = 1U << thread.lane();
  if ((mask & lane_bit) == 0) fail(site, text("expected a mask with the lane's own bit, got ", Hex{mask}));
  Warp& warp = thread.block->warps[thread.warp()];
  if (const unsigned gone = mask & ~warp.live; gone != 0) {
    fail(site, text("expected all lanes of mask ", Hex{mask}, ", but there are no lanes ", Hex{gone},
                    " or they have exited"));
  }
  std::vector<Exchange>& exchanges = warp.exchanges;
  Exchange* other = nullptr;
  auto mine = exchanges.begin();
  for (; mine != exchanges.end(); ++mine) {
    if (mine->mask == mask && same_site(mine->site, site)) break;
    if ((mine->mask & lane_bit) != 0) other = &*mine;
  }
  if (mine == exchanges.end()) {
    if (other != nullptr) {
      fail(site, text("expected the lane at ", other->site, " with mask ", Hex{other->mask}, ", where lanes ",
                      Hex{other->arrived}, " wait; got mask ", Hex{mask}));
    }
    mine = exchanges.insert(exchanges.end(), Exchange{.site = site, .mask = mask});
  }
  const std::shared_ptr<LaneValues> values = mine->values;
  std::memcpy(values->lanes[thread.lane()].data(), value, bytes);
  mine->arrived |= lane_bit;
  mine->waiting.push_back(&thread);
  thread.waits_at = site;
  if (mine->arrived == mask) {
    for (Thread* waiting : mine->waiting) cluster().make_ready(*waiting);
    exchanges.erase(mine);
  }
  cluster().wait();
  return values;
}

int lane_id() { return static_cast<int>(this_thread().lane()); }

SharedMemory shared_memory() {
  return {this_thread().block->shared.begin(), this_thread().block->shared.size()};
}
unsigned rank_in_cluster() { return this_thread().block->rank; }
unsigned blocks_of_cluster() { return static_cast<unsigned>(cluster().blocks().size()); }

SharedMemory shared_memory_of(const Site& site, unsigned rank) {
  if (rank >= blocks_of_cluster()) {
    fail(site, text("expected a rank below the cluster's size ", blocks_of_cluster(), ", got ", rank));
  }
  const SharedBlock& shared = cluster().blocks()[rank]->shared;
  return {shared.begin(), shared.size()};
}

void start_copy(const Site& site, void* shared, const void* global, int bytes, int valid_bytes) {
  const auto aligned = [&](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
  };
  const SharedMemory memory = shared_memory();
  const auto offset = static_cast<std::byte*>(shared) - memory.begin;
  if (offset < 0 || static_cast<size_t>(offset + bytes) > memory.bytes) {
    fail(site, text("expected a destination within the ", memory.bytes,
                    " bytes of shared memory, got offset ", offset));
  }
  if (!aligned(shared) || !aligned(global)) {
    fail(site, text("expected addresses aligned to ", bytes, " bytes, got ", shared, " and ", global));
  }
  if (valid_bytes < 0 || valid_bytes > bytes) {
    fail(site, text("expected 0 to ", bytes, " valid bytes, got ", valid_bytes));
  }
  this_thread().copies.start(shared, global, static_cast<size_t>(bytes), static_cast<size_t>(valid_bytes));
}

void commit_copies() { this_thread().copies.commit(); }

void wait_for_copies(size_t newest_that_may_go_on) { this_thread().copies.wait(newest_that_may_go_on); }

}  // namespace tinyserve::cuda::emulator
