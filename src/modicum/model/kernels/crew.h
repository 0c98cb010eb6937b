// Threads that help the one that calls, all of them on one piece of work at a time.
//
// They wait for each other some thirty times a token and are called again as soon as it is chosen: too often to go to
// sleep, which is what OpenMP's threads do at once where more threads than processors exist, be they idle, and an
// engine's thread beside the main one is such a case. To wake one takes longer than to choose the token.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <unistd.h>

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Crew {
 public:
  using Work = std::function<void(int64_t part, int64_t parts)>;

  // The calling thread's own crew; a child of fork() has none of its parent's threads.
  static Crew& of(int64_t threads) {
    static thread_local std::unique_ptr<Crew> own;
    if (!own || own->state->threads != threads || own->process != getpid()) own.reset(new Crew(threads));
    return *own;
  }
  ~Crew() {
    state->ending = true;
    state->call();
  }
  // Each does its part; returns when all have. Work that throws, where memory ends, ends the process: the others would
  // wait for it for ever.
  void run(const Work& work) noexcept {
    state->work = &work;
    state->call();
    work(0, state->threads);
    wait(0);
  }
  int64_t threads() const { return state->threads; }
  // Within the work: until all have come here.
  void wait(int64_t part) { state->wait(part); }

 private:
  // Each thread has what only others wait for in cache lines of its own.
  struct alignas(64) Flag { std::atomic<int64_t> meeting{0}; };
  static constexpr int64_t HOPS = 10;

  struct State {
    explicit State(int64_t count) : threads(count), flags(count * HOPS), meetings(count) {}
    const int64_t threads;
    const Work* work = nullptr;
    bool ending = false;
    alignas(64) std::atomic<unsigned> calls{0};
    std::vector<Flag> flags;
    std::vector<Flag> meetings;  // how often each thread has waited, which it alone looks at

    void call() {
      calls.fetch_add(1, std::memory_order_release);
      calls.notify_all();
    }
    // Each tells the next that it is here, then the one two further on, and so on: after a few hops all know of all
    // (Hensgen, Finkel and Manber 1988), and nobody writes what another writes.
    void wait(int64_t part) {
      const int64_t now = meetings[part].meeting.fetch_add(1, std::memory_order_relaxed) + 1;
      for (int64_t hop = 0, far = 1; far < threads; ++hop, far *= 2) {
        flags[(part + far) % threads * HOPS + hop].meeting.store(now, std::memory_order_release);
        const auto& here = flags[part * HOPS + hop].meeting;
        for (int spins = 0; here.load(std::memory_order_acquire) < now; ++spins) {
          relax();
          // half a millisecond: another program has the processor of the last one; sooner, it would get this one too
          if (spins > 50000) std::this_thread::yield();
        }
      }
    }
    void serve(int64_t part) {
      for (unsigned seen = 0;; ++seen) {
        for (int spins = 0; spins < 20000 && calls.load(std::memory_order_acquire) == seen; ++spins) relax();
        calls.wait(seen, std::memory_order_acquire);
        if (ending) return;
        (*work)(part, threads);
        wait(part);
      }
    }
  };

  explicit Crew(int64_t threads) : state(std::make_shared<State>(threads)), process(getpid()) {
    // on their own at the end: a process that ends need not wait for them
    for (int64_t part = 1; part < threads; ++part) std::thread([s = state, part] { s->serve(part); }).detach();
  }
  const std::shared_ptr<State> state;
  const pid_t process;
};
