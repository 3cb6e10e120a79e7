// NVIDIA's management library for two cards that are not there, as its reference describes the functions that we call.
#include <cstddef>
#include <cstdio>
#include <cstring>

extern "C" {
typedef struct nvmlDevice *nvmlDevice_t;

struct nvmlMemory_v2_t {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};
struct nvmlDevice {
    const char *name, *bus;
    unsigned long long used;
};

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MISMATCH = 25 };
static nvmlDevice cards[] = {{"NVIDIA A", "00000000:17:00.0", 5ull << 30}, {"NVIDIA B", "00000000:3B:00.0", 123456789}};
static int initialised = 0;

static int text(const char *from, char *to, unsigned int length) {
    if (!initialised) return UNINITIALIZED;
    if (std::strlen(from) + 1 > length) return INSUFFICIENT_SIZE;
    std::strcpy(to, from);
    return SUCCESS;
}

int nvmlInit_v2() { return initialised = 1, SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_FOUND ? "Not Found" : "Another Error"; }
int nvmlSystemGetDriverVersion(char *version, unsigned int length) { return text("580.105.08", version, length); }
int nvmlDeviceGetCount_v2(unsigned int *count) { return *count = 2, initialised ? SUCCESS : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index > 1) return INVALID_ARGUMENT;
    *device = &cards[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    unsigned domain, number, slot, own[3];
    if (std::sscanf(bus, "%x:%x:%x.0", &domain, &number, &slot) != 3) return INVALID_ARGUMENT;
    for (nvmlDevice &card : cards) {
        std::sscanf(card.bus, "%x:%x:%x.0", &own[0], &own[1], &own[2]);
        if (own[0] != domain || own[1] != number || own[2] != slot) continue;
        *device = &card;
        return SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    *index = static_cast<unsigned int>(device - cards);
    return SUCCESS;
}
int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) { return text(device->name, name, length); }
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof(nvmlMemory_v2_t) | 2 << 24)) return MISMATCH;
    memory->total = 80ull << 30;
    memory->reserved = 400 << 20;
    memory->used = device->used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
}
