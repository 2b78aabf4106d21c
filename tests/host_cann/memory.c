/* Memory: "device" memory is host memory.
 *
 * Freeing waits for nothing, and a freed block is the first that the next allocation of its size gets, so that a task which still
 * reads it reads wrong data. Its addresses stay mapped: a late reader never crashes. With HOST_CANN_POISON=1 fresh and
 * freed memory is full of ones, which is NaN in every floating-point type. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

enum { PAGE = 4096 };
static const size_t KEPT_BYTES = 256u << 20;  /* contents of freed blocks; beyond, only their addresses are kept */

enum kind { DEVICE, PINNED };
struct block {
    char* start;
    size_t bytes;
    enum kind kind;
    struct block* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *used, *unused;
static size_t on_device, kept;

static size_t capacity(void) { return setting("HOST_CANN_MEMORY_MB", 65536) << 20; }
static bool poison(void) { return setting("HOST_CANN_POISON", 0) != 0; }

/* Takes a block out of its list; `place` is the pointer in the list that leads to it. */
static struct block* take(struct block** place) {
    struct block* block = *place;
    *place = block->next;
    return block;
}

static aclError allocate(void** pointer, size_t wanted, enum kind kind) {
    size_t bytes = ((wanted ? wanted : 1) + PAGE - 1) / PAGE * PAGE;
    struct block* block = NULL;
    aclError error = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (kind == DEVICE && on_device + bytes > capacity()) {
        set_error("host_cann: %zu bytes wanted, %zu of %zu in use", bytes, on_device, capacity());
        error = ACL_ERROR_RT_MEMORY_ALLOCATION;
    } else {
        struct block** place = &unused;
        while (*place && !((*place)->bytes == bytes && (*place)->kind == kind)) place = &(*place)->next;
        if (*place) {
            block = take(place);
            kept -= kept < bytes ? kept : bytes;
        } else if ((block = calloc(1, sizeof *block))) {
            void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (start == MAP_FAILED) free(block), block = NULL;
            else *block = (struct block){start, bytes, kind, NULL};
        }
        if (!block) error = ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    if (block) {
        if (poison()) memset(block->start, 0xff, bytes);
        if (kind == DEVICE) on_device += bytes;
        block->next = used;
        used = block;
        *pointer = block->start;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static aclError release(void* pointer, enum kind kind) {
    aclError error = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    struct block** place = &used;
    while (*place && !((*place)->start == pointer && (*place)->kind == kind)) place = &(*place)->next;
    if (*place) {
        struct block* block = take(place);
        if (kind == DEVICE) on_device -= block->bytes;
        if (poison()) memset(block->start, 0xff, block->bytes);
        if (kept + block->bytes > KEPT_BYTES) madvise(block->start, block->bytes, MADV_DONTNEED);
        else kept += block->bytes;
        block->next = unused;
        unused = block;
    } else {
        set_error("host_cann: %p is freed, but nothing is allocated there", pointer);
        error = ACL_ERROR_RT_PARAM_INVALID;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static bool find(const void* pointer, enum kind* kind) {
    pthread_mutex_lock(&lock);
    struct block* block = used;
    while (block && !(block->start <= (const char*)pointer && (const char*)pointer < block->start + block->bytes)) block = block->next;
    if (block) *kind = block->kind;
    pthread_mutex_unlock(&lock);
    return block != NULL;
}

bool is_pinned(const void* pointer) {
    enum kind kind;
    return find(pointer, &kind) && kind == PINNED;
}

/* --- the interface -------------------------------------------------------------------------------------------------- */

aclError aclrtMalloc(void** p, size_t n, aclrtMemMallocPolicy policy) { (void)policy; return allocate(p, n, DEVICE); }
aclError aclrtMallocAlign32(void** p, size_t n, aclrtMemMallocPolicy policy) { (void)policy; return allocate(p, n, DEVICE); }
aclError aclrtMallocHost(void** p, size_t n) { return allocate(p, n, PINNED); }
aclError aclrtMallocHostWithCfg(void** p, uint64_t n, aclrtMallocConfig* config) { (void)config; return allocate(p, n, PINNED); }
aclError aclrtFree(void* p) { return release(p, DEVICE); }
aclError aclrtFreeHost(void* p) { return release(p, PINNED); }

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
    enum kind kind;
    memset(attributes, 0, sizeof *attributes);
    attributes->location.id = (uint32_t)current_device();
    attributes->location.type = !find(pointer, &kind) ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                : kind == PINNED      ? ACL_MEM_LOCATION_TYPE_HOST
                                                      : ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->pageSize = PAGE;
    return ACL_SUCCESS;
}

/* These two wait for no stream, as on a device. */
aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind kind) {
    (void)kind;
    if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
    memmove(dst, src, count);
    return ACL_SUCCESS;
}
aclError aclrtMemset(void* dst, size_t room, int32_t value, size_t count) {
    if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
    memset(dst, value, count);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t* free_bytes, size_t* total) {
    (void)attribute;
    pthread_mutex_lock(&lock);
    *total = capacity();
    *free_bytes = *total - on_device;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}
aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo* info, size_t wanted, size_t* given) {
    (void)device, (void)info, (void)wanted;
    *given = 0;
    return ACL_SUCCESS;
}

/* Expandable segments: addresses are reserved and mapped at once; a physical block is an amount that counts. */
aclError aclrtReserveMemAddress(void** p, size_t size, size_t alignment, void* expected, uint64_t flags) {
    (void)alignment, (void)expected, (void)flags;
    void* start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *p = start;
    return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* p) { (void)p; return ACL_SUCCESS; }
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* property, uint64_t flags) {
    (void)property, (void)flags;
    size_t* amount = malloc(sizeof *amount);
    aclError error = amount ? ACL_SUCCESS : ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
    pthread_mutex_lock(&lock);
    if (amount && on_device + size > capacity()) error = ACL_ERROR_RT_MEMORY_ALLOCATION;
    if (!error) on_device += *amount = size;
    pthread_mutex_unlock(&lock);
    if (error) free(amount);
    else *handle = amount;
    return error;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    pthread_mutex_lock(&lock);
    on_device -= *(size_t*)handle;
    pthread_mutex_unlock(&lock);
    free(handle);
    return ACL_SUCCESS;
}
aclError aclrtMapMem(void* p, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)offset, (void)handle, (void)flags;
    if (poison()) memset(p, 0xff, size);
    return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* p) { (void)p; return ACL_SUCCESS; }
