#include "file_reader.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../shared/file_read.h"

namespace qload::cuda {

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("file reader: ") + cudaGetErrorString(error));
}

}  // namespace

FileReader::FileReader(void* memory, size_t buffer_bytes, int threads)
    : memory_(static_cast<char*>(memory)), buffer_bytes_(buffer_bytes / ALIGNED * ALIGNED) {
  if (!buffer_bytes_ || threads < 1) throw std::runtime_error("file reader: no buffers, or no threads");
  try {
    check(cudaGetDevice(&device_));
    for (int i = 0; i < threads; ++i) {
      streams_.push_back(nullptr);
      check(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking));
    }
    for (int i = 0; i < threads * BUFFERS; ++i) {
      free_.push_back(nullptr);
      check(cudaEventCreateWithFlags(&free_.back(), cudaEventDisableTiming | cudaEventBlockingSync));
    }
    const SignalsBlocked blocked;
    for (int i = 0; i < threads; ++i) threads_.emplace_back(&FileReader::work, this, i);
  } catch (...) {
    close();
    throw;
  }
}

FileReader::~FileReader() {
  close();
  for (const auto& [number, ticket] : tickets_) {
    events_.push_back(ticket->ready);
    events_.insert(events_.end(), ticket->copied.begin(), ticket->copied.end());
  }
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
}

cudaError_t FileReader::begin(const std::vector<FileRange>& ranges, cudaStream_t home, uint64_t* number) {
  auto ticket = std::make_shared<Ticket>();
  std::deque<Job> jobs;
  for (auto& chunks : divide(ranges)) jobs.push_back({ticket, std::move(chunks), nullptr});
  ticket->pending = jobs.size();
  std::unique_lock<std::mutex> held(lock_);
  cudaError_t error = take_event(&ticket->ready);
  for (auto job = jobs.begin(); job != jobs.end() && error == cudaSuccess; ++job) {
    error = take_event(&job->copied);
    if (error == cudaSuccess) ticket->copied.push_back(job->copied);
  }
  if (error == cudaSuccess) error = cudaEventRecord(ticket->ready, home);
  if (error != cudaSuccess) {
    if (ticket->ready) events_.push_back(ticket->ready);
    events_.insert(events_.end(), ticket->copied.begin(), ticket->copied.end());
    return error;
  }
  if (closing_) {
    ticket->pending = 0;
    ticket->failure = {0, ECANCELED, cudaSuccess};
  } else {
    std::move(jobs.begin(), jobs.end(), std::back_inserter(jobs_));
  }
  tickets_[*number = ++last_] = std::move(ticket);
  held.unlock();  // the woken threads need the lock at once
  more_.notify_all();
  return cudaSuccess;
}

bool FileReader::is_read(uint64_t number, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> held(lock_);
  const std::shared_ptr<Ticket> ticket = find(number)->second;
  return done_.wait_for(held, patience, [&] { return !ticket->pending; });
}

Failure FileReader::wait(uint64_t number, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock_);
  const auto found = find(number);
  const std::shared_ptr<Ticket> ticket = std::move(found->second);
  tickets_.erase(found);
  done_.wait(held, [&] { return !ticket->pending; });
  for (cudaEvent_t event : ticket->copied) {  // also for a failed ticket, whose other copies are in flight
    const cudaError_t error = cudaStreamWaitEvent(stream, event, 0);
    if (error != cudaSuccess && ticket->failure.range < 0) ticket->failure = {0, 0, error};
  }
  events_.push_back(ticket->ready);
  events_.insert(events_.end(), ticket->copied.begin(), ticket->copied.end());
  return ticket->failure;
}

cudaError_t FileReader::close() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    closing_ = true;
    for (const Job& job : jobs_) {
      if (job.ticket->failure.range < 0) job.ticket->failure = {job.chunks.front().number, ECANCELED, cudaSuccess};
      --job.ticket->pending;
    }
    jobs_.clear();
  }
  more_.notify_all();
  done_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  cudaError_t worst = cudaSuccess;
  for (cudaStream_t stream : std::exchange(streams_, {})) {
    const cudaError_t error = stream ? cudaStreamSynchronize(stream) : cudaSuccess;
    if (error != cudaSuccess) worst = error;
    if (stream) cudaStreamDestroy(stream);
  }
  for (cudaEvent_t event : std::exchange(free_, {})) {
    if (event) cudaEventDestroy(event);
  }
  return worst;
}

void FileReader::work(int own) {
  const cudaError_t broken = cudaSetDevice(device_);
  for (int turn = 0;; turn = (turn + 1) % BUFFERS) {
    Job job;
    {
      std::unique_lock<std::mutex> held(lock_);
      more_.wait(held, [&] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const int place = own * BUFFERS + turn;
    char* const buffer = memory_ + place * buffer_bytes_;
    const cudaError_t error = broken == cudaSuccess ? cudaEventSynchronize(free_[place]) : broken;
    Failure failure;
    if (error != cudaSuccess) failure = {job.chunks.front().number, 0, error};
    if (failure.range < 0) failure = read(job, buffer);
    if (failure.range < 0) failure = copy(job, buffer, streams_[own], free_[place]);
    end(job, failure);
  }
}

Failure FileReader::read(const Job& job, char* buffer) {
  for (const auto& [range, number, at] : job.chunks) {
    const int error = read_all(range.descriptor, range.offset, buffer + at, range.bytes);
    if (error) return {number, std::max(error, 0), cudaSuccess};
  }
  return {};
}

Failure FileReader::copy(const Job& job, const char* buffer, cudaStream_t stream, cudaEvent_t free) {
  cudaError_t error = cudaStreamWaitEvent(stream, job.ticket->ready, 0);
  for (auto chunk = job.chunks.begin(); chunk != job.chunks.end() && error == cudaSuccess;) {
    const Chunk& first = *chunk;
    char* const to = static_cast<char*>(first.range.to);
    size_t bytes = 0;
    for (; chunk != job.chunks.end() && chunk->number == first.number; ++chunk) {  // runs of a range in one copy
      if (chunk->range.to != to + bytes || chunk->at != first.at + bytes) break;
      bytes += chunk->range.bytes;
    }
    error = cudaMemcpyAsync(to, buffer + first.at, bytes, cudaMemcpyHostToDevice, stream);
  }
  for (cudaEvent_t event : {free, job.copied}) {  // also after an error, for the copies before it
    const cudaError_t recorded = cudaEventRecord(event, stream);
    if (error == cudaSuccess) error = recorded;
  }
  return error == cudaSuccess ? Failure{} : Failure{job.chunks.front().number, 0, error};
}

void FileReader::end(const Job& job, const Failure& failure) {
  const std::lock_guard<std::mutex> held(lock_);
  Ticket& ticket = *job.ticket;
  if (failure.range >= 0 && (ticket.failure.range < 0 || failure.range < ticket.failure.range)) ticket.failure = failure;
  if (!--ticket.pending) done_.notify_all();
}

std::vector<std::vector<FileReader::Chunk>> FileReader::divide(const std::vector<FileRange>& ranges) const {
  std::vector<std::vector<Chunk>> jobs;
  size_t room = 0;  // of the last job
  for (size_t number = 0; number < ranges.size(); ++number) {
    const FileRange& range = ranges[number];
    for (int64_t run = 0; run < range.runs; ++run) {
      FileRange rest = {range.descriptor, range.offset + run * range.distance, range.bytes,
                        static_cast<char*>(range.to) + run * range.bytes};
      while (rest.bytes) {
        if (!room || (room < rest.bytes && rest.bytes <= buffer_bytes_)) {
          jobs.emplace_back();
          room = buffer_bytes_;
        }
        const size_t bytes = std::min(rest.bytes, room);
        jobs.back().push_back({{rest.descriptor, rest.offset, bytes, rest.to}, static_cast<int64_t>(number),
                               buffer_bytes_ - room});
        room -= std::min(room, (bytes + ALIGNED - 1) / ALIGNED * ALIGNED);
        rest = {rest.descriptor, rest.offset + static_cast<int64_t>(bytes), rest.bytes - bytes,
                static_cast<char*>(rest.to) + bytes};
      }
    }
  }
  return jobs;
}

std::map<uint64_t, std::shared_ptr<FileReader::Ticket>>::iterator FileReader::find(uint64_t number) {
  const auto found = tickets_.find(number);
  if (found == tickets_.end()) throw std::runtime_error("file reader: a ticket that was waited for, or never was");
  return found;
}

cudaError_t FileReader::take_event(cudaEvent_t* event) {
  *event = nullptr;
  if (events_.empty()) return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  *event = events_.back();
  events_.pop_back();
  return cudaSuccess;
}

}  // namespace qload::cuda
