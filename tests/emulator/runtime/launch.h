// What the parts of the emulator need of a launch.
#ifndef EMULATOR_LAUNCH_H
#define EMULATOR_LAUNCH_H
#include "common.h"

namespace emu {

struct Cluster;
struct Failure {};  // thrown by fail() outside of fibers

const void *kernel_module();  // where the kernel's shared library is loaded
const std::string &message_text();
void reset_report(int seed);
void reset_races();
void reset_flags();
void check_cluster_at_exit(Cluster &cluster);

}  // namespace emu
#endif
