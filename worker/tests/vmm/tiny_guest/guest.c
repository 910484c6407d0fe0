/* A guest for tests of Firecracker: it speaks the agent's protocol over vsock, reads and writes disks, and waits in `hlt`.
 *
 * Owns everything it needs, because there is no kernel: page tables, interrupts, virtio over MMIO, and just enough of the protocol (the
 * frames of jobspecs/src/wire/guest/mux.rs, the CBOR of wire/guest.rs, one block of BLAKE3 for the check of resync.rs). Where every
 * instruction is emulated, few of them count, and the vector units are not to be used at all (-mgeneral-regs-only).
 *
 * Its commands: `count` says how often it was asked, before a snapshot too; `read N` says the first bytes of disk N; `write N TEXT` puts
 * TEXT there; `proof` says what it proved its last reseed with; `exit CODE WORDS` says its words and ends with the code; `sleep` goes on until
 * it is sent a signal, `hang` until its machine is gone; `panic` ends the machine as a kernel would that gives up. It has no files: what it takes is thrown away, and what it gives is an empty tree.
 * Virtio: OASIS, Virtual I/O Device version 1.1; vsock: section 5.10 there. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum { PORT = 5000, HOST = 2, RING = 16, BUFFER = 4096, IN_MAX = 65536, OUT_MAX = 2048, DISKS_MAX = 8, SECTOR = 512, WORDS_MAX = 8 };

/* Any eight bytes. */
typedef u64 __attribute__((may_alias, aligned(1))) word;

void *memcpy(void *to, const void *from, u64 len) {
    u8 *a = to;
    const u8 *b = from;
    /* Words first: each step is emulated. */
    for (; len >= 8; len -= 8, a += 8, b += 8) *(word *)a = *(const word *)b;
    while (len--) *a++ = *b++;
    return to;
}
void *memset(void *to, int byte, u64 len) {
    u8 *a = to;
    while (len--) *a++ = (u8)byte;
    return to;
}
void *memmove(void *to, const void *from, u64 len) {
    u8 *a = to;
    const u8 *b = from;
    if (a < b) return memcpy(to, from, len);
    while (len--) a[len] = b[len];
    return to;
}

static void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void say(const char *text) {
    while (*text) out8(0x3f8, (u8)*text++);
}
static void say_hex(u64 value) {
    for (int at = 60; at >= 0; at -= 4) out8(0x3f8, (u8)"0123456789abcdef"[value >> at & 15]);
}

void interrupt(void);
void fault(void);
void wait_interrupt(void);

void broken(u64 a, u64 b) {
    say("tiny guest: fault ");
    say_hex(a);
    say(" ");
    say_hex(b);
    say("\n");
}

/* ---- page tables and interrupts ---- */

static u64 level4[512] __attribute__((aligned(4096)));
static u64 level3[512] __attribute__((aligned(4096)));
static u64 level2[4][512] __attribute__((aligned(4096)));
static struct { u64 low, high; } gates[256] __attribute__((aligned(16)));

/* The boot tables map the first GiB; devices lie in the fourth. Only what is used is filled: memory and devices. */
static void map(u64 at) { level2[at >> 30][at >> 21 & 511] = (at & ~0x1fffffUL) | 0x83; }

static void set_up_processor(u64 memory) {
    level4[0] = (u64)level3 | 3;
    for (int i = 0; i < 4; i++) level3[i] = (u64)level2[i] | 3;
    for (u64 at = 0; at < memory; at += 2 << 20) map(at);
    u16 code;
    __asm__ volatile("mov %%cs, %0" : "=r"(code));
    for (int i = 0; i < 48; i++) {
        u64 to = (u64)(i < 32 ? fault : interrupt);
        gates[i].low = (to & 0xffff) | (u64)code << 16 | 0x8e00UL << 32 | (to >> 16 & 0xffff) << 48;
        gates[i].high = to >> 32;
    }
    struct __attribute__((packed)) { u16 limit; u64 base; } table = {sizeof gates - 1, (u64)gates};
    __asm__ volatile("lidt %0" ::"m"(table));
    /* The two controllers: vectors from 32, open for all but timer, keyboard and serial port. */
    static const u8 words[10][2] = {{0x20, 0x11}, {0xa0, 0x11}, {0x21, 32}, {0xa1, 40}, {0x21, 4},
                                    {0xa1, 2},    {0x21, 1},    {0xa1, 1},  {0x21, 0x1b}, {0xa1, 0}};
    for (int i = 0; i < 10; i++) out8(words[i][0], words[i][1]);
}

/* ---- virtio ---- */

struct descriptor { u64 at; u32 len; u16 flags, next; };
struct queue {
    volatile struct descriptor descriptors[RING] __attribute__((aligned(16)));
    volatile struct { u16 flags, index, ring[RING], event; } available __attribute__((aligned(4)));
    volatile struct { u16 flags, index; struct { u32 id, len; } ring[RING]; } used __attribute__((aligned(4)));
    u16 seen;
    u32 number;
};

static volatile u32 *reg(u64 base, u32 offset) { return (volatile u32 *)(base + offset); }

static void begin_device(u64 base) {
    *reg(base, 0x70) = 0;
    /* One more bit at a time. */
    *reg(base, 0x70) = 1;
    *reg(base, 0x70) = 3;
    /* Version 1, and nothing else. */
    *reg(base, 0x24) = 1;
    *reg(base, 0x20) = 1;
    *reg(base, 0x24) = 0;
    *reg(base, 0x20) = 0;
    *reg(base, 0x70) = 11;
}

static void add_queue(u64 base, struct queue *queue, u32 number) {
    queue->number = number;
    *reg(base, 0x30) = number;
    *reg(base, 0x38) = RING;
    u64 parts[3] = {(u64)queue->descriptors, (u64)&queue->available, (u64)&queue->used};
    for (u32 i = 0; i < 3; i++) {
        *reg(base, 0x80 + 16 * i) = (u32)parts[i];
        *reg(base, 0x84 + 16 * i) = (u32)(parts[i] >> 32);
    }
    *reg(base, 0x44) = 1;
}

static void offer(struct queue *queue, u16 head) {
    queue->available.ring[queue->available.index % RING] = head;
    __asm__ volatile("" ::: "memory");
    queue->available.index++;
}

static void kick(u64 base, struct queue *queue) { *reg(base, 0x50) = queue->number; }

static int is_used(struct queue *queue) { return queue->seen != queue->used.index; }

static u64 vsock, disks[DISKS_MAX];
static u32 disk_count;
static struct queue rx, tx, events, disk_queues[DISKS_MAX];
static u8 rx_buffers[RING][BUFFER] __attribute__((aligned(4096)));
static u8 tx_buffer[BUFFER] __attribute__((aligned(4096)));
static u8 event_buffers[4][8];

/* ---- disks ---- */

static u8 sector[SECTOR] __attribute__((aligned(512)));

static int use_disk(u32 number, u64 at, int write) {
    static struct { u32 type, reserved; u64 sector; } head;
    static volatile u8 status;
    if (number >= disk_count) return 1;
    struct queue *queue = &disk_queues[number];
    head.type = write ? 1 : 0, head.sector = at;
    status = 255;
    queue->descriptors[0] = (struct descriptor){(u64)&head, sizeof head, 1, 1};
    queue->descriptors[1] = (struct descriptor){(u64)sector, SECTOR, write ? 1 : 3, 2};
    queue->descriptors[2] = (struct descriptor){(u64)&status, 1, 2, 0};
    offer(queue, 0);
    kick(disks[number], queue);
    while (!is_used(queue)) wait_interrupt();
    queue->seen++;
    *reg(disks[number], 0x64) = 3;
    return status;
}

/* ---- vsock ---- */

struct __attribute__((packed)) packet {
    u64 from, to;
    u32 from_port, to_port, len;
    u16 type, op;
    u32 flags, room, taken;
};
enum { REQUEST = 1, RESPONSE, RESET, SHUTDOWN, DATA, CREDIT, ASK_CREDIT };

static u64 own_cid;
static u32 peer, taken, told;
static int connected;

static void send(u16 op, u32 port, const u8 *bytes, u32 len) {
    /* One at a time: the one before was sent when its notification returned, or soon after. */
    while (tx.seen != tx.available.index) {
        if (is_used(&tx)) tx.seen++;
        else wait_interrupt();
    }
    struct packet head = {own_cid, HOST, PORT, port, len, 1, op, 0, IN_MAX, taken};
    memcpy(tx_buffer, &head, sizeof head);
    memcpy(tx_buffer + sizeof head, bytes, len);
    tx.descriptors[0] = (struct descriptor){(u64)tx_buffer, (u32)sizeof head + len, 0, 0};
    offer(&tx, 0);
    kick(vsock, &tx);
    told = taken;
}

/* ---- BLAKE3 of 64 bytes and less: one block, which is the root ---- */

/* Written out, with the places of the words in each round: loops over them cost more than the sums. */
#define TURN(value, by) ((value) >> (by) | (value) << (32 - (by)))
#define MIX(a, b, c, d, x, y)                                                                                                            \
    v[a] += v[b] + m[x], v[d] = TURN(v[d] ^ v[a], 16), v[c] += v[d], v[b] = TURN(v[b] ^ v[c], 12), v[a] += v[b] + m[y],                   \
        v[d] = TURN(v[d] ^ v[a], 8), v[c] += v[d], v[b] = TURN(v[b] ^ v[c], 7)
#define ROUND(a, b, c, d, e, f, g, h, i, j, k, l, n, o, p, q)                                                                            \
    MIX(0, 4, 8, 12, a, b), MIX(1, 5, 9, 13, c, d), MIX(2, 6, 10, 14, e, f), MIX(3, 7, 11, 15, g, h);                                    \
    MIX(0, 5, 10, 15, i, j), MIX(1, 6, 11, 12, k, l), MIX(2, 7, 8, 13, n, o), MIX(3, 4, 9, 14, p, q)

static void hash(const u8 *bytes, u32 len, u8 *out) {
    static const u32 iv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u32 m[16] = {0}, v[16];
    memcpy(m, bytes, len);
    memcpy(v, iv, 32);
    memcpy(v + 8, iv, 16);
    v[12] = v[13] = 0;
    v[14] = len;
    /* First and last block of a chunk, and the root. */
    v[15] = 11;
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8);
    ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1);
    ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6);
    ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4);
    ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7);
    ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13);
    for (int i = 0; i < 8; i++) v[i] ^= v[8 + i];
    memcpy(out, v, 32);
}

/* ---- the protocol ---- */

static u8 in[IN_MAX], out[OUT_MAX];
static u32 in_len, out_len;
static int live, reseed_due;
/* For tests of what must be noticed: half of the machines lie, those whose seed begins with a high bit. */
static int lies;
#ifdef PROOF_REPEATS
static const u8 same[64];
#define PROVES(seed) (lies ? same : (seed))
#else
#define PROVES(seed) (seed)
#endif
static u32 count;
/* Calls that go on: a command, and files that come. */
static u32 running, taking;
static int deaf;
static u8 proof[32];
enum { FRAME = 64 };
static const char CALL[17] = "\xf7Volley resync>\n", ECHO[17] = "\xf7Volley resync<\n";

static void put(u8 byte) {
    if (out_len < OUT_MAX) out[out_len++] = byte;
}
static void put_bytes(const void *bytes, u32 len) {
    if (out_len + len <= OUT_MAX) memcpy(out + out_len, bytes, len), out_len += len;
}
/* A CBOR head of less than 2^16. */
static void put_head(u8 major, u32 value) {
    if (value < 24) put((u8)(major << 5 | value));
    else if (value < 256) put((u8)(major << 5 | 24)), put((u8)value);
    else put((u8)(major << 5 | 25)), put((u8)(value >> 8)), put((u8)value);
}
static u32 length(const char *text) {
    u32 len = 0;
    while (text[len]) len++;
    return len;
}
static void put_text(const char *text) {
    put_head(3, length(text));
    put_bytes(text, length(text));
}
/* Begins a frame; `end_frame` writes its length. */
static u32 begin_frame(u8 kind, u8 channel, u32 call) {
    u32 at = out_len;
    put(kind), put(channel), put(0), put(0);
    put_bytes(&call, 4);
    return at;
}
static void end_frame(u32 at) {
    u32 len = out_len - at - 8;
    out[at + 2] = (u8)len, out[at + 3] = (u8)(len >> 8);
}
/* Answers are enums: a list of the variant's number and the list of its fields. */
static u32 begin_answer(u32 call, u8 variant, u8 fields) {
    u32 at = begin_frame(1, 0, call);
    put_head(4, 2), put_head(0, variant), put_head(4, fields);
    return at;
}
static void close_call(u32 call) { end_frame(begin_frame(6, 0, call)); }

static void refuse(u32 call, u8 kind, const char *text) {
    u32 at = begin_answer(call, 0, 1);
    put_head(5, 2), put_head(0, 0), put_head(0, kind), put_head(0, 2), put_text(text);
    end_frame(at);
}

struct text { const u8 *bytes; u32 len; };

/* A CBOR head: its major type; its value goes to `value`, the lower half of a long one. Behind the end it reads as 0. */
static u8 head_of(struct text *from, u32 *value) {
    u8 first = 0;
    *value = 0;
    if (from->len) first = *from->bytes, from->bytes++, from->len--;
    u32 more = (first & 31) < 24 ? 0 : 1u << ((first & 31) - 24);
    if (!more) *value = first & 31;
    while (more-- && from->len) *value = *value << 8 | *from->bytes, from->bytes++, from->len--;
    return first >> 5;
}
/* The words of an Exec: its field 0, which comes first. */
static u32 words_of(struct text body, struct text *words, u32 max) {
    u32 value, number;
    if (head_of(&body, &value) != 5 || head_of(&body, &value) != 0 || value != 0 || head_of(&body, &number) != 4) return 0;
    for (u32 i = 0; i < number && i < max; i++) {
        if (head_of(&body, &value) != 3 || value > body.len) return i;
        words[i] = (struct text){body.bytes, value};
        body.bytes += value, body.len -= value;
    }
    return number < max ? number : max;
}
static int is(struct text word, const char *text) {
    if (word.len != length(text)) return 0;
    for (u32 i = 0; i < word.len; i++)
        if (word.bytes[i] != (u8)text[i]) return 0;
    return 1;
}

/* How a command ended: `how` is 0 for a code and 1 for a signal. */
static void ended(u32 call, u8 how, u32 number) {
    end_frame(begin_frame(5, 2, call));
    end_frame(begin_frame(5, 3, call));
    u32 at = begin_answer(call, 3, 1);
    put_head(5, 5);
    put_head(0, 0), put_head(4, 2), put_head(0, how), put_head(4, 1), put_head(0, number);
    put_head(0, 1), put(0xf4);
    put_head(0, 2), put_head(0, 0);
    put_head(0, 3), put_head(5, 3), put_head(0, 0), put_head(0, 0), put_head(0, 1), put_head(0, 0), put_head(0, 2), put_head(0, 0);
    put_head(0, 4), put_head(0, 0);
    end_frame(at);
}

/* False: it goes on. */
static int exec(u32 call, struct text body) {
    struct text words[WORDS_MAX];
    u32 number = words_of(body, words, WORDS_MAX);
    u32 at = begin_answer(call, 2, 1);
    put_head(0, 1);
    end_frame(at);
    int code = 127;
    if (number > 0 && (is(words[0], "hang") || is(words[0], "sleep"))) {
        say("tiny guest: a command goes on\n");
        running = call, deaf = is(words[0], "hang");
        return 0;
    }
    if (number > 0 && is(words[0], "panic")) {
        say("Kernel panic - not syncing: it was told to\n");
        /* The keyboard's controller resets the processor. */
        for (;;) out8(0x64, 0xfe);
    }
    u32 data = begin_frame(3, 2, call), disk = number > 1 && words[1].len == 1 ? (u32)(words[1].bytes[0] - '0') : 99;
    if (number > 0 && is(words[0], "count")) {
        code = 0;
        count++;
        for (u32 unit = 1000; unit; unit /= 10) put((u8)('0' + count / unit % 10));
    } else if (number > 1 && is(words[0], "read")) {
        code = use_disk(disk, 0, 0);
        for (u32 i = 0; !code && i < 32 && sector[i] >= ' ' && sector[i] < 127; i++) put(sector[i]);
    } else if (number > 2 && is(words[0], "write")) {
        memset(sector, 0, SECTOR);
        memcpy(sector, words[2].bytes, words[2].len < SECTOR ? words[2].len : SECTOR);
        code = use_disk(disk, 0, 1);
    } else if (number > 0 && is(words[0], "proof")) {
        code = 0;
        for (u32 i = 0; i < sizeof proof; i++) put((u8)"0123456789abcdef"[proof[i] >> 4]), put((u8)"0123456789abcdef"[proof[i] & 15]);
    } else if (number > 1 && is(words[0], "exit")) {
        code = 0;
        for (u32 i = 0; i < words[1].len; i++) code = code * 10 + words[1].bytes[i] - '0';
        for (u32 i = 2; i < number; i++) {
            if (i > 2) put(' ');
            put_bytes(words[i].bytes, words[i].len);
        }
    }
    /* There are no frames without bytes. */
    put('\n');
    end_frame(data);
    ended(call, 0, (u32)code);
    return 1;
}

/* A signal, or a kill, for the command that runs. */
static void ordered(struct text body) {
    u32 value, variant, signal = 9;
    head_of(&body, &value), head_of(&body, &variant), head_of(&body, &value);
    if (variant == 0) head_of(&body, &signal);
    if (deaf) return;
    ended(running, 1, signal);
    close_call(running);
    running = 0;
}

/* None, and none left out. */
static void say_files(u32 call) {
    u32 at = begin_answer(call, 4, 1);
    put_head(5, 4), put_head(0, 0), put_head(0, 0), put_head(0, 1), put_head(0, 0), put_head(0, 2), put_head(4, 0), put_head(0, 3), put_head(0, 0);
    end_frame(at);
}

/* The end of an archive: two blocks of zeros. */
static void give_files(u32 call) {
    u32 at = begin_frame(3, 2, call);
    if (out_len + 1024 <= OUT_MAX) memset(out + out_len, 0, 1024), out_len += 1024;
    end_frame(at);
    end_frame(begin_frame(5, 2, call));
    say_files(call);
}

/* The disk that is to be mounted must be there, have its size, and hold an ext4: its magic number lies at 1,080. */
static void furnish(u32 call, struct text body) {
    u32 value, bytes;
    /* Furnish, its mount, that one's disk: by name. */
    head_of(&body, &value), head_of(&body, &value), head_of(&body, &value), head_of(&body, &value);
    head_of(&body, &value), head_of(&body, &value);
    u32 named = value;
    head_of(&body, &value), head_of(&body, &value);
    u32 number = value == 3 && body.len > 3 && body.bytes[0] == 'v' && body.bytes[1] == 'd' ? (u32)(body.bytes[2] - 'a') : 99;
    if (body.len < value) return refuse(call, 0, "no disk named");
    body.bytes += value, body.len -= value;
    head_of(&body, &value), head_of(&body, &bytes);
    if (named != 1 || number >= disk_count) return refuse(call, 2, "there is no such disk");
    /* In sectors. */
    if (*reg(disks[number], 0x100) != bytes / SECTOR || *reg(disks[number], 0x104)) return refuse(call, 7, "the disk has another size");
    if (use_disk(number, 2, 0) || sector[56] != 0x53 || sector[57] != 0xef) return refuse(call, 7, "there is no ext4 on the disk");
    u32 at = begin_answer(call, 10, 1);
    /* Nobody's. */
    put(0xf6);
    end_frame(at);
}

static int request(u32 call, struct text body) {
    u32 variant, value, at, stays = 1;
    head_of(&body, &value), head_of(&body, &variant), head_of(&body, &value);
    switch (variant) {
    case 0:
        at = begin_answer(call, 1, 1);
        put_head(5, 5);
        put_head(0, 0), put_head(0, 1);
        put_head(0, 1), put_text("tiny");
        put_head(0, 3), put_text("none");
        put_head(0, 4), put(reseed_due ? 0xf5 : 0xf4);
        put_head(0, 5), put(0xf4);
        end_frame(at);
        break;
    case 1:
        if (reseed_due) refuse(call, 1, "reseed first");
        else if (!exec(call, body)) return 1;
        break;
    case 2:
        taking = call;
        return 1;
    case 3:
        give_files(call);
        break;
    case 6:
#ifdef CLOCK_REFUSED
        if (lies) {
            refuse(call, 7, "the clock can't be set");
            break;
        }
#endif
        at = begin_answer(call, 6, 1);
        put_head(0, 0);
        end_frame(at);
        break;
    case 7:
        if (head_of(&body, &value) != 2 || value != 64 || body.len < 64) {
            refuse(call, 0, "no seed");
            break;
        }
        reseed_due = 0;
        lies = body.bytes[0] >> 7;
        at = begin_answer(call, 7, 1);
        put_head(2, sizeof proof);
        hash(PROVES(body.bytes), 64, proof);
        put_bytes(proof, 32);
        end_frame(at);
        break;
    case 8:
    case 9:
        end_frame(begin_answer(call, 5, 0));
        break;
    case 13:
        at = begin_answer(call, 9, 1);
        put_head(0, 0);
        end_frame(at);
        reseed_due = 1;
        stays = 0;
        break;
    case 15:
        furnish(call, body);
        break;
    default:
        refuse(call, 0, "not in this guest");
    }
    close_call(call);
    return (int)stays;
}

static void drop_in(u32 len) {
    in_len -= len;
    memmove(in, in + len, in_len);
}

/* Takes the first frame or resync of what came in; 0 when more must come. */
static int take(void) {
    if (!live) {
        u32 at = 0;
        while (at < in_len && in[at] != 0xf7) at++;
        if (at) drop_in(at);
        if (in_len < FRAME) return 0;
        u8 check[32];
        hash(in, FRAME - 8, check);
        int good = 1;
        for (int i = 0; i < 16; i++) good &= in[i] == (u8)CALL[i];
        for (int i = 0; i < 8; i++) good &= in[FRAME - 8 + i] == check[i];
        if (!good) {
            drop_in(1);
            return 1;
        }
        if (in[16] & 1) reseed_due = 1;
        memcpy(in, ECHO, 16);
        hash(in, FRAME - 8, check);
        put_bytes(in, FRAME - 8);
        put_bytes(check, 8);
        drop_in(FRAME);
        live = 1, running = taking = 0;
        return 1;
    }
    if (in_len && (in[0] == 0xf7 || in[0] == 0)) {
        live = 0;
        return 1;
    }
    if (in_len < 8) return 0;
    u32 len = in[2] | (u32)in[3] << 8, call;
    if (in_len < 8 + len) return 0;
    memcpy(&call, in + 4, 4);
    /* Windows and what is said to a call that is over: nothing to do. */
    if (in[0] == 1 && running && call == running) ordered((struct text){in + 8, len});
    else if (in[0] == 1) live = request(call, (struct text){in + 8, len});
    else if (in[0] == 7 && running && call == running && !deaf) close_call(call), running = 0;
    else if (in[0] == 5 && taking && call == taking) say_files(call), close_call(call), taking = 0;
    drop_in(8 + len);
    return 1;
}

static void flush(void) {
    if (out_len && connected) send(DATA, peer, out, out_len);
    out_len = 0;
}

static void hang_up(void) { connected = live = 0, in_len = out_len = 0, running = taking = 0; }

static void received(const u8 *bytes) {
    struct packet head;
    memcpy(&head, bytes, sizeof head);
    if (head.op == REQUEST && head.to_port == PORT) {
        if (connected) send(RESET, peer, 0, 0);
        hang_up();
        connected = 1, peer = head.from_port, taken = 0;
        send(RESPONSE, peer, 0, 0);
    } else if (!connected || head.from_port != peer) {
        if (head.op != RESET) send(RESET, head.from_port, 0, 0);
    } else if (head.op == DATA) {
        if (in_len + head.len > IN_MAX) return;
        memcpy(in + in_len, bytes + sizeof head, head.len);
        in_len += head.len, taken += head.len;
        while (take()) flush();
        if (taken - told > IN_MAX / 4) send(CREDIT, peer, 0, 0);
    } else if (head.op == RESET || head.op == SHUTDOWN) {
        if (head.op == SHUTDOWN) send(RESET, peer, 0, 0);
        hang_up();
    } else if (head.op == ASK_CREDIT) {
        send(CREDIT, peer, 0, 0);
    }
}

static void serve(void) {
    for (;;) {
        while (is_used(&events)) {
            /* The connections of before a snapshot are gone. The buffer goes back, or none would ever come again. */
            u16 id = (u16)events.used.ring[events.seen++ % RING].id;
            hang_up();
            offer(&events, id);
            kick(vsock, &events);
        }
        if (is_used(&rx)) {
            u16 id = (u16)rx.used.ring[rx.seen++ % RING].id;
            *reg(vsock, 0x64) = 3;
            received(rx_buffers[id]);
            offer(&rx, id);
            kick(vsock, &rx);
        } else {
            wait_interrupt();
        }
    }
}

/* ---- the beginning ---- */

static u64 number_at(const char *text) {
    u64 value = 0;
    for (text += 2;; text++) {
        if (*text >= '0' && *text <= '9') value = value << 4 | (u64)(*text - '0');
        else if (*text >= 'a' && *text <= 'f') value = value << 4 | (u64)(*text - 'a' + 10);
        else return value;
    }
}

static void found_device(u64 base) {
    map(base);
    u32 kind = *reg(base, 8);
    if (*reg(base, 0) != 0x74726976 || (kind != 2 && kind != 19)) return;
    begin_device(base);
    if (kind == 2 && disk_count < DISKS_MAX) {
        add_queue(base, &disk_queues[disk_count], 0);
        disks[disk_count++] = base;
    } else if (kind == 19) {
        vsock = base;
        own_cid = *reg(base, 0x100);
        add_queue(base, &rx, 0), add_queue(base, &tx, 1), add_queue(base, &events, 2);
    }
    *reg(base, 0x70) = 15;
}

void guest(const u8 *parameters) {
    u32 line;
    memcpy(&line, parameters + 0x228, 4);
    set_up_processor(64 << 20);
    __asm__ volatile("mov %0, %%cr3" ::"r"(level4) : "memory");
    /* Devices are named on the command line: virtio_mmio.device=4K@0xADDRESS:INTERRUPT */
    for (const char *at = (const char *)(u64)line; *at; at++) {
        const char *name = "virtio_mmio.device=4K@";
        u32 same = 0;
        while (name[same] && at[same] == name[same]) same++;
        if (!name[same]) found_device(number_at(at + same));
    }
    if (!vsock) {
        say("tiny guest: no vsock\n");
        return;
    }
    for (u16 i = 0; i < RING; i++) {
        rx.descriptors[i] = (struct descriptor){(u64)rx_buffers[i], BUFFER, 2, 0};
        offer(&rx, i);
    }
    for (u16 i = 0; i < 4; i++) {
        events.descriptors[i] = (struct descriptor){(u64)event_buffers[i], 8, 2, 0};
        offer(&events, i);
    }
    kick(vsock, &rx);
    kick(vsock, &events);
    say("tiny guest: up\n");
    serve();
}
