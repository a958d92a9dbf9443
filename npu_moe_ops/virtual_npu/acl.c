/* The calls of AscendCL that do something on a machine without an NPU.

   One device, whose memory is memory of the host. Work is done when it is issued, so a stream is always idle; but on
   a stream that captures a graph, work is recorded, and done each time the graph is executed. What would have to wait
   for the device while a graph is captured is refused, and the capture with it. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, OUT_OF_MEMORY = 207001, IN_CAPTURE = 107030, NOT_HERE = 500002, KERNEL_FAILED = 507011 };
enum { ALIGNMENT = 512, HANDLE_SIZE = 64 };

/* --- the last error: shown in the exception that torch_npu raises --- */

static __thread char message[512];
static __thread char message_read[512];

const char *aclGetRecentErrMsg(void) {
    memcpy(message_read, message, sizeof message);
    message[0] = 0;
    return message_read;
}

int vnpu_refuse(const char *name) {
    snprintf(message, sizeof message, "virtual NPU: %s of CANN has no stand-in", name);
    return NOT_HERE;
}

int aclrtPeekAtLastError(int level) { return OK; }
int aclrtGetLastError(int level) { return OK; }

/* --- device --- */

static char context[4096];

int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return OK; }
int aclrtGetDevice(int32_t *device) { *device = 0; return OK; }
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
int aclrtGetRunMode(int *mode) { *mode = 1; return OK; }
int aclrtGetCurrentContext(void **out) { *out = context; return OK; }
int aclrtCreateContext(void **out, int32_t device) { *out = context; return OK; }

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return OK;
}

int aclrtGetMemInfo(int kind, size_t *left, size_t *total) {
    *left = 60ull << 30;
    *total = 64ull << 30;
    return OK;
}

int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    static const int64_t values[] = {20, 40, 192ll << 20}; /* cube cores, vector cores, bytes of L2 */
    *value = what >= 0 && what < 3 ? values[what] : 0;
    return OK;
}

int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) {
    if (what != 1 && what != 101) return vnpu_refuse("aclrtGetDeviceInfo");
    *value = what == 1 ? 20 : 40;
    return OK;
}

int aclrtDeviceGetUuid(int32_t device, void *uuid) { memset(uuid, 0, 16); return OK; }
int aclrtGetDeviceUUID(int32_t device, void *uuid) { memset(uuid, 0, 16); return OK; }
int aclGetCannAttribute(int attribute, int32_t *value) { *value = 0; return OK; }
int aclsysGetCANNVersion(int package, char *version) { strcpy(version, "9.0.0"); return OK; }
int aclsysGetVersionStr(const char *package, char *version) { strcpy(version, "9.0.0"); return OK; }
size_t aclGetCompileoptSize(int option) { return 64; }

int aclGetCompileopt(int option, char *value, size_t size) {
    enum { JIT_COMPILE = 10 };
    snprintf(value, size, "%s", option == JIT_COMPILE ? "disable" : "high_precision");
    return OK;
}

/* --- memory: new memory of the device is all ones, a NaN in each floating type --- */

static int allocate(void **out, size_t size, int fill) {
    size_t bytes = size ? size + 64 : ALIGNMENT;
    if (posix_memalign(out, ALIGNMENT, bytes)) {
        snprintf(message, sizeof message, "virtual NPU: the host has no %zu bytes left", bytes);
        return OUT_OF_MEMORY;
    }
    if (fill) memset(*out, 0xff, bytes);
    return OK;
}

int aclrtMalloc(void **out, size_t size, int policy) { return allocate(out, size, 1); }
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocate(out, size, 1); }
int aclrtMallocCached(void **out, size_t size, int policy) { return allocate(out, size, 1); }
int aclrtMallocHost(void **out, size_t size) { return allocate(out, size, 0); }
int aclrtFree(void *memory) { free(memory); return OK; }
int aclrtFreeHost(void *memory) { free(memory); return OK; }

/* --- graphs, streams, events --- */

typedef struct {
    enum { COPY, FILL, KERNEL } kind;
    void *to;
    const void *from;
    size_t size;
    int64_t value; /* of FILL: the byte; of KERNEL: its number */
} Entry;

typedef struct Graph {
    uint32_t id;
    int mode;
    char broken[400]; /* what was refused while it was captured */
    pthread_t thread;
    Entry *entries;
    size_t count, room;
    struct Graph *next; /* of those being captured */
} Graph;

typedef struct {
    int32_t id;
    uint32_t graph; /* which capture it takes part in; 0: none. That capture may have ended. */
} Handle;           /* of a stream, or an event */

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Graph *captures;
static Handle default_stream;
static __thread int thread_mode = GLOBAL;
static int (*run_kernel)(int64_t number);
static void (*free_kernel)(int64_t number);

static Handle *stream_of(void *stream) { return stream ? stream : &default_stream; }

static Graph *find(uint32_t id) {
    Graph *graph = captures;
    while (graph && graph->id != id) graph = graph->next;
    return id ? graph : NULL;
}

static Graph *capture_of(void *stream) {
    pthread_mutex_lock(&lock);
    Graph *graph = find(stream_of(stream)->graph);
    pthread_mutex_unlock(&lock);
    return graph;
}

static int record(Graph *graph, Entry entry) {
    pthread_mutex_lock(&lock);
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->entries = realloc(graph->entries, graph->room * sizeof(Entry));
        if (!graph->entries) abort();
    }
    graph->entries[graph->count++] = entry;
    pthread_mutex_unlock(&lock);
    return OK;
}

static int in_capture(Graph *graph, const char *what) {
    if (!graph->broken[0]) snprintf(graph->broken, sizeof graph->broken, "%s", what);
    snprintf(message, sizeof message, "virtual NPU: not allowed while a graph is being captured: %s", what);
    return IN_CAPTURE;
}

/* Whether to refuse a call that waits for the device: on a stream that captures, always; else it depends on the modes
   of the captures and of this thread. stream: NULL if it waits for all. */
static int may_wait(void *stream, const char *what) {
    pthread_t self = pthread_self();
    int result = OK;
    pthread_mutex_lock(&lock);
    for (Graph *graph = captures; graph && !result; graph = graph->next) {
        int own_stream = stream && ((Handle *)stream)->graph == graph->id;
        int own_thread = pthread_equal(graph->thread, self) && graph->mode != RELAXED;
        int unsafe = thread_mode != RELAXED && (own_thread || (thread_mode == GLOBAL && graph->mode == GLOBAL));
        if (own_stream || unsafe) result = in_capture(graph, what);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int create(void **out) {
    static int32_t last;
    Handle *handle = calloc(1, HANDLE_SIZE);
    if (!handle) return OUT_OF_MEMORY;
    handle->id = __sync_add_and_fetch(&last, 1);
    *out = handle;
    return OK;
}

int aclrtCreateStream(void **out) { return create(out); }
int aclrtCreateStreamV2(void **out, const void *config) { return create(out); }
int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flag) { return create(out); }
int aclrtDestroyStream(void *stream) { free(stream); return OK; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return OK; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = stream_of(stream)->id; return OK; }
int aclrtStreamQuery(void *stream, int *status) { *status = 1; return OK; }
int aclrtSynchronizeStream(void *stream) { return may_wait(stream_of(stream), "aclrtSynchronizeStream"); }

int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) {
    return may_wait(stream_of(stream), "aclrtSynchronizeStreamWithTimeout");
}

int aclrtSynchronizeDevice(void) { return may_wait(NULL, "aclrtSynchronizeDevice"); }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return may_wait(NULL, "aclrtSynchronizeDeviceWithTimeout"); }

int aclrtCreateEvent(void **out) { return create(out); }
int aclrtCreateEventWithFlag(void **out, uint32_t flag) { return create(out); }
int aclrtCreateEventExWithFlag(void **out, uint32_t flag) { return create(out); }
int aclrtDestroyEvent(void *event) { free(event); return OK; }
int aclrtGetEventId(void *event, uint32_t *id) { *id = ((Handle *)event)->id; return OK; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtSynchronizeEvent(void *event) { return may_wait(event, "aclrtSynchronizeEvent"); }

int aclrtSynchronizeEventWithTimeout(void *event, int32_t timeout) {
    return may_wait(event, "aclrtSynchronizeEventWithTimeout");
}

/* A stream that waits for an event of a capture takes part in that capture. */
int aclrtRecordEvent(void *event, void *stream) {
    ((Handle *)event)->graph = stream_of(stream)->graph;
    return OK;
}

int aclrtStreamWaitEvent(void *stream, void *event) {
    pthread_mutex_lock(&lock);
    Graph *graph = find(((Handle *)event)->graph);
    if (graph) stream_of(stream)->graph = graph->id;
    pthread_mutex_unlock(&lock);
    return OK;
}

int aclrtStreamWaitEventWithTimeout(void *stream, void *event, int32_t timeout) {
    return aclrtStreamWaitEvent(stream, event);
}

int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0.01f; return OK; }
int aclrtEventGetTimestamp(void *event, uint64_t *timestamp) { *timestamp = 1; return OK; }
int aclrtCreateNotify(void **out, uint64_t flag) { return create(out); }
int aclrtDestroyNotify(void *notify) { free(notify); return OK; }

/* --- work --- */

enum { DEVICE_TO_DEVICE = 3 };

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    int refused = may_wait(NULL, "aclrtMemcpy");
    if (!refused) memmove(to, from, size);
    return refused;
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    int refused = may_wait(NULL, "aclrtMemset");
    if (!refused) memset(to, value, size);
    return refused;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    Graph *graph = capture_of(stream);
    if (!graph) {
        memmove(to, from, size);
        return OK;
    }
    if (kind != DEVICE_TO_DEVICE) return in_capture(graph, "a copy between host and device");
    return record(graph, (Entry){COPY, to, from, size, 0});
}

int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream) {
    Graph *graph = capture_of(stream);
    if (graph) return record(graph, (Entry){FILL, to, NULL, size, value});
    memset(to, value, size);
    return OK;
}

/* No operator of CANN is here: never report that one has run. */
static int no_operator(const char *type) {
    snprintf(message, sizeof message, "virtual NPU: operator %s was sent to CANN, which is not here", type);
    return NOT_HERE;
}

int aclopCompileAndExecute(const char *type) { return no_operator(type); }
int aclopCompileAndExecuteV2(const char *type) { return no_operator(type); }
int aclopExecuteV2(const char *type) { return no_operator(type); }
int aclopCompile(const char *type) { return no_operator(type); }

/* --- capture and replay --- */

int aclmdlRICaptureBegin(void *stream, int mode) {
    static uint32_t last;
    Graph *busy = capture_of(stream);
    if (busy) return in_capture(busy, "aclmdlRICaptureBegin");
    Graph *graph = calloc(1, sizeof(Graph));
    if (!graph) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    graph->id = ++last;
    graph->mode = mode;
    graph->thread = pthread_self();
    graph->next = captures;
    captures = graph;
    stream_of(stream)->graph = graph->id;
    pthread_mutex_unlock(&lock);
    return OK;
}

int aclmdlRICaptureGetInfo(void *stream, int *status, void **out) {
    Graph *graph = capture_of(stream);
    *status = !graph ? 0 : graph->broken[0] ? 2 : 1;
    if (out) *out = graph;
    return OK;
}

int aclmdlRIDestroy(void *model) {
    Graph *graph = model;
    if (!graph) return OK;
    for (size_t i = 0; i < graph->count; i++)
        if (graph->entries[i].kind == KERNEL && free_kernel) free_kernel(graph->entries[i].value);
    free(graph->entries);
    free(graph);
    return OK;
}

int aclmdlRICaptureEnd(void *stream, void **out) {
    pthread_mutex_lock(&lock);
    Graph *graph = find(stream_of(stream)->graph);
    for (Graph **link = &captures; graph && *link; link = &(*link)->next)
        if (*link == graph) {
            *link = graph->next;
            break;
        }
    stream_of(stream)->graph = 0;
    pthread_mutex_unlock(&lock);
    if (out) *out = NULL;
    if (!graph) return vnpu_refuse("aclmdlRICaptureEnd without a capture");
    if (graph->broken[0]) {
        snprintf(message, sizeof message, "virtual NPU: the capture is void, for it was refused: %s", graph->broken);
        aclmdlRIDestroy(graph);
        return IN_CAPTURE;
    }
    if (out) *out = graph;
    return OK;
}

int aclmdlRICaptureThreadExchangeMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

int aclmdlRIGetId(void *model, uint32_t *id) { *id = ((Graph *)model)->id; return OK; }

static int replay(const Graph *graph) {
    for (size_t i = 0; i < graph->count; i++) {
        const Entry *entry = graph->entries + i;
        if (entry->kind == COPY) memmove(entry->to, entry->from, entry->size);
        else if (entry->kind == FILL) memset(entry->to, (int)entry->value, entry->size);
        else if (!run_kernel || run_kernel(entry->value)) return KERNEL_FAILED; /* which has set the message */
    }
    return OK;
}

int aclmdlRIExecuteAsync(void *model, void *stream) {
    Graph *busy = capture_of(stream);
    return busy ? in_capture(busy, "aclmdlRIExecuteAsync") : replay(model);
}

int aclmdlRIExecute(void *model, int32_t timeout) {
    int refused = may_wait(NULL, "aclmdlRIExecute");
    return refused ? refused : replay(model);
}

int aclmdlRICaptureTaskGrpBegin(void *stream) { return OK; }
int aclmdlRICaptureTaskGrpEnd(void *stream, void **handle) { return create(handle); }

/* --- for device.py --- */

void vnpu_set_message(const char *text) { snprintf(message, sizeof message, "%s", text); }

void vnpu_set_kernels(int (*run)(int64_t), void (*release)(int64_t)) {
    run_kernel = run;
    free_kernel = release;
}

int vnpu_capturing(void *stream) { return capture_of(stream) != NULL; }
int vnpu_may_wait(void *stream, const char *what) { return may_wait(stream_of(stream), what); }

int vnpu_break_capture(void *stream, const char *what) {
    Graph *graph = capture_of(stream);
    return graph ? in_capture(graph, what) : OK;
}

int vnpu_record(void *stream, int64_t number) {
    Graph *graph = capture_of(stream);
    return graph ? record(graph, (Entry){KERNEL, NULL, NULL, 0, number}) : vnpu_refuse("a kernel of no capture");
}

/* --- of CANN's own C library --- */

int vsnprintf_s(char *to, size_t room, size_t count, const char *format, va_list values) {
    return vsnprintf(to, room < count + 1 ? room : count + 1, format, values);
}

int snprintf_s(char *to, size_t room, size_t count, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int written = vsnprintf_s(to, room, count, format, values);
    va_end(values);
    return written;
}

int strcpy_s(char *to, size_t room, const char *from) {
    return snprintf(to, room, "%s", from) < (int)room ? OK : 1;
}
