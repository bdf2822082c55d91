#include "base/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "base/metrics_server.h"
#include "base/unique_fd.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsTest, HandlesOfOneSeriesAreTheSame) {
  MetricsTable table;
  table.GetCounter("zs_steps_total", "Steps.", {{"job", "a"}})->Increment();
  table.GetCounter("zs_steps_total", "Steps.", {{"job", "a"}})->Increment(2);
  table.GetCounter("zs_steps_total", "Steps.", {{"job", "b"}})->Increment();
  EXPECT_EQ(table.GetCounter("zs_steps_total", "", {{"job", "a"}})->value(), 3);
}

TEST(MetricsTest, CountsFromManyThreads) {
  MetricsTable table;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&table] {
      const auto counter = table.GetCounter("zs_c_total", "C.");
      const auto histogram = table.GetHistogram("zs_h_seconds", "H.");
      for (int j = 0; j < 1000; ++j) {
        counter->Increment();
        histogram->Observe(0.001);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.GetCounter("zs_c_total", "")->value(), 4000);
  EXPECT_NEAR(table.GetHistogram("zs_h_seconds", "")->sum(), 4.0, 1e-9);
}

TEST(MetricsTest, HistogramBucketsIncludeTheirBound) {
  Histogram histogram({1, 2});
  for (const double value : {0.5, 1.0, 1.5, 2.0, 3.0}) histogram.Observe(value);
  EXPECT_THAT(histogram.counts(), ::testing::ElementsAre(2, 2, 1));
  EXPECT_EQ(histogram.sum(), 8.0);
}

TEST(MetricsTest, TextFormat) {
  MetricsTable table;
  table.GetCounter("zs_steps_total", "Steps.", {{"job", "a"}})->Increment(3);
  table.GetGauge("zs_bytes", "Bytes.")->Set(7);
  table.GetHistogram("zs_wait_seconds", "Waits.", {}, {0.5})->Observe(0.25);
  const std::string text = MetricsText(table);
  EXPECT_THAT(text, HasSubstr("# HELP zs_steps_total Steps."));
  EXPECT_THAT(text, HasSubstr("# TYPE zs_steps_total counter"));
  EXPECT_THAT(text, HasSubstr("zs_steps_total{job=\"a\"} 3"));
  EXPECT_THAT(text, HasSubstr("zs_bytes 7"));
  EXPECT_THAT(text, HasSubstr("zs_wait_seconds_bucket{le=\"0.5\"} 1"));
  EXPECT_THAT(text, HasSubstr("zs_wait_seconds_bucket{le=\"+Inf\"} 1"));
  EXPECT_THAT(text, HasSubstr("zs_wait_seconds_count 1"));
}

TEST(MetricsTest, RemovedSeriesAreNotExportedAnyMore) {
  MetricsTable table;
  const auto handle = table.GetGauge("zs_bytes", "Bytes.", {{"job", "a"}});
  table.GetGauge("zs_bytes", "Bytes.", {{"job", "b"}})->Set(2);
  table.RemoveSeries("job", "a");
  handle->Set(1);
  EXPECT_THAT(MetricsText(table), Not(HasSubstr("job=\"a\"")));
  EXPECT_THAT(MetricsText(table), HasSubstr("zs_bytes{job=\"b\"} 2"));
}

TEST(MetricsTest, AFullTableCountsWhatItDrops) {
  MetricsTable table(2);
  for (const char* job : {"a", "b", "c", "d"}) {
    table.GetCounter("zs_c_total", "C.", {{"job", job}})->Increment();
  }
  EXPECT_THAT(MetricsText(table), HasSubstr("zeroshard_metrics_dropped_series_total 2"));
  EXPECT_THAT(MetricsText(table), Not(HasSubstr("job=\"c\"")));
  table.RemoveSeries("job", "a");
  table.GetCounter("zs_c_total", "C.", {{"job", "c"}})->Increment();
  EXPECT_THAT(MetricsText(table), HasSubstr("job=\"c\""));
}

std::string HttpGet(int port, const std::string& path) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return "";
  }
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(::write(socket.get(), request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  std::string reply;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(socket.get(), buffer, sizeof(buffer))) > 0;) {
    reply.append(buffer, static_cast<size_t>(got));
  }
  return reply;
}

TEST(MetricsServerTest, ServesTheTable) {
  const auto table = std::make_shared<MetricsTable>();
  table->GetGauge("zs_bytes", "Bytes.")->Set(42);
  const auto server = MetricsServer::Start(table, {});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics"), HasSubstr("zs_bytes 42"));
}

TEST(MetricsServerTest, AUsedPortAndBadAddressesAreErrors) {
  const auto table = std::make_shared<MetricsTable>();
  const auto first = MetricsServer::Start(table, {}).value();
  const std::string used = "127.0.0.1:" + std::to_string(first->port());
  EXPECT_EQ(MetricsServer::Start(table, {.address = used}).status().code(),
            absl::StatusCode::kAlreadyExists);
  for (const char* bad : {"0.0.0.0:0", "localhost:1", "127.0.0.1", "127.0.0.1:70000", ":80", ""}) {
    EXPECT_EQ(MetricsServer::Start(table, {.address = bad}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

}  // namespace
}  // namespace zeroshard
