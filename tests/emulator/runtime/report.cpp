// Messages, random numbers and number formats.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "launch.h"
#include "threads.h"

namespace emu {

Config config;
Stats stats;

static u64 random_state;
static std::string message;
static bool failed;

void reset_report(int seed) {
    message.clear();
    failed = false;
    random_state = 0x9E3779B97F4A7C15ull ^ (static_cast<u64>(seed) * 0xD1342543DE82EF95ull + 1);
    for (int i = 0; i < 8; ++i) random_u32();
}

u32 random_u32() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<u32>(random_state >> 32);
}

static void append(const char *format, va_list args) {
    char line[2048];
    vsnprintf(line, sizeof line, format, args);
    message += line;
}

void put(const char *format, ...) {
    va_list args;
    va_start(args, format);
    append(format, args);
    va_end(args);
}

const std::string &message_text() { return message; }
bool message_is_empty() { return message.empty(); }
bool has_failed() { return failed; }
void set_failed() { failed = true; }

void fail(const char *format, ...) {
    failed = true;
    if (!message.empty()) message += "\n";
    va_list args;
    va_start(args, format);
    append(format, args);
    va_end(args);
    if (current) {
        put(" [block %d, warp %d, lane %d]", current->cta->block, current->warp->in_cta, current->lane);
        put_call_stack();
    }
    end_launch();
}

void end_launch() {
    if (!current) throw Failure();
    leave_fiber();
}

std::string pc_token(const void *pc) {
    Dl_info info;
    if (!dladdr(pc, &info) || info.dli_fbase != kernel_module()) return "";
    char out[32];
    snprintf(out, sizeof out, "{pc+0x%zx}",
             static_cast<size_t>(static_cast<const char *>(pc) - static_cast<const char *>(info.dli_fbase)));
    return out;
}

void put_call_stack() {
    if (!current) return;
    void **frame = static_cast<void **>(__builtin_frame_address(0));
    std::string tokens;
    for (int depth = 0; depth < 32; ++depth) {
        char *at = reinterpret_cast<char *>(frame);
        if (at < current->stack || at > current->stack + kStackBytes - 16) break;
        tokens += pc_token(frame[1]);
        frame = static_cast<void **>(frame[0]);
    }
    if (!tokens.empty()) message += "\n    at " + tokens;
}

std::string text(Site site) {
    if (site.line < 0) return pc_token(site.file);
    return std::string(site.file ? site.file : "?") + ":" + std::to_string(site.line);
}

#if defined(__x86_64__)
float f16_to_f32(u16 x) { return _cvtsh_ss(x); }
u16 f32_to_f16(float x) { return _cvtss_sh(x, 0); }
#else
float f16_to_f32(u16 x) {
    __fp16 h;
    memcpy(&h, &x, 2);
    return h;
}
u16 f32_to_f16(float x) {
    __fp16 h = static_cast<__fp16>(x);
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
#endif

}  // namespace emu

float emu_f16_to_f32(uint16_t x) { return emu::f16_to_f32(x); }
uint16_t emu_f32_to_f16(float x) { return emu::f32_to_f16(x); }
