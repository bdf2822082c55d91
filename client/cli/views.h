// What the `zeroshard` command prints of the daemon's answers. Pure.

#ifndef ZEROSHARD_CLIENT_CLI_VIEWS_H_
#define ZEROSHARD_CLIENT_CLI_VIEWS_H_

#include <string>

#include "proto/admin.pb.h"
#include "proto/trainer.pb.h"

namespace zeroshard {

std::string StatusText(const admin::v1::GetStatusReply& reply);
std::string JobsText(const admin::v1::ListJobsReply& reply);
std::string JobText(const admin::v1::GetJobReply& reply);
std::string TiersText(const admin::v1::ListTiersReply& reply);
std::string NvmeFilesText(const admin::v1::ListNvmeFilesReply& reply);
std::string ConfigText(const admin::v1::ResolveConfigReply& reply);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_VIEWS_H_
