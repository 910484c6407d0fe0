//! Which system calls a task in a container may make.
//!
//! Owns the list: what is named may be called, what is known to be for those who run a host is refused as not permitted, and everything else
//! as not there, so that programs which try a newer call first fall back to an older one. What is left out: mounts, modules, other
//! processes' memory and keys, namespaces, the clock, tracing and counting the kernel, swap, quota, reboot, raw devices, user faults, io_uring.

use serde_json::{Value, json};

/// Not permitted.
const EPERM: u32 = 1;
/// Not there.
const ENOSYS: u32 = 38;
/// Flags of `clone` that make namespaces: linux/sched.h, `CLONE_NEWNS` to `CLONE_NEWNET`, with `CLONE_NEWCGROUP`.
const CLONE_NEW: u64 = 0x7E02_0000;
/// A family of sockets that reaches the host of a virtual machine whatever the network namespace.
const AF_VSOCK: u64 = 40;
/// What a program may ask its personality to be: Linux, that without randomised addresses, and asking which it is.
const PERSONALITIES: [u64; 5] = [0, 0x0004_0000, 8, 0x0002_0008, 0xFFFF_FFFF];

/// Files and directories.
const FILES: &str = "access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 \
    epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 faccessat faccessat2 fadvise64 fadvise64_64 \
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fremovexattr \
    fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futimesat getcwd getdents getdents64 getxattr getxattrat \
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 \
    io_setup io_submit ioctl lchown lchown32 lgetxattr link linkat listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr \
    lstat lstat64 mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2 pipe pipe2 poll ppoll ppoll_time64 pread64 \
    preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename renameat renameat2 \
    rmdir select _newselect pselect6 pselect6_time64 sendfile sendfile64 setxattr setxattrat splice stat stat64 statfs statfs64 statx symlink \
    symlinkat sync sync_file_range sync_file_range2 syncfs tee truncate truncate64 umask unlink unlinkat utime utimensat \
    utimensat_time64 utimes vmsplice write writev";
/// Memory.
const MEMORY: &str = "brk cachestat madvise map_shadow_stack memfd_create memfd_secret membarrier mincore mlock mlock2 mlockall mmap mmap2 \
    mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_mrelease remap_file_pages get_mempolicy \
    mbind set_mempolicy set_mempolicy_home_node";
/// Processes, threads, signals, users, limits.
const PROCESSES: &str = "alarm arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_time64 futex_wait \
    futex_waitv futex_wake get_robust_list get_thread_area getcpu getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 \
    getpgid getpgrp getpid getppid getpriority getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid gettid getuid getuid32 \
    ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self modify_ldt nanosleep pause pidfd_open \
    pidfd_send_signal prctl prlimit64 ptrace restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn \
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity \
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr \
    sched_setparam sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsgid32 setfsuid \
    setfsuid32 setgid setgid32 setgroups setgroups32 setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 \
    setreuid setreuid32 setrlimit setsid setuid setuid32 sigaltstack signalfd signalfd4 sigprocmask sigreturn tgkill time timer_create \
    timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime \
    timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill ugetrlimit uname vfork wait4 waitid waitpid";
/// Sockets, queues and shared memory between the container's own processes; time and randomness.
const OTHERS: &str = "accept accept4 adjtimex bind clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime \
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 connect getitimer getpeername getrandom getsockname getsockopt gettimeofday ipc \
    listen mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink msgctl msgget \
    msgrcv msgsnd recv recvfrom recvmmsg recvmmsg_time64 recvmsg semctl semget semop semtimedop semtimedop_time64 send sendmmsg sendmsg sendto \
    setitimer setsockopt shmat shmctl shmdt shmget shutdown socketcall socketpair sysinfo";
/// For those who run a host.
const REFUSED: &str = "acct add_key bpf chroot clock_settime clock_settime64 create_module delete_module fanotify_init fanotify_mark \
    finit_module fsconfig fsmount fsopen fspick get_kernel_syms init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp \
    kexec_file_load kexec_load keyctl lookup_dcookie migrate_pages mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at \
    open_tree perf_event_open pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev query_module quotactl quotactl_fd \
    reboot request_key setdomainname sethostname setns settimeofday stime swapoff swapon _sysctl sysfs syslog umount umount2 unshare uselib \
    userfaultfd ustat vhangup vm86 vm86old";

/// The profile, as the runtime specification has it.
#[must_use]
pub fn profile() -> Value {
    let names = |list: &str| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let allowed: Vec<String> = [FILES, MEMORY, PROCESSES, OTHERS].into_iter().flat_map(names).collect();
    let only = |name: &str, index: u32, op: &str, value: u64, other: Option<u64>| {
        let mut rule = json!({ "index": index, "value": value, "op": op });
        if let Some(other) = other {
            rule["valueTwo"] = json!(other);
        }
        json!({ "names": [name], "action": "SCMP_ACT_ALLOW", "args": [rule] })
    };
    let mut rules = vec![
        json!({ "names": allowed, "action": "SCMP_ACT_ALLOW" }),
        json!({ "names": names(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM }),
        // Its flags lie in memory, which a filter can't see; programs fall back to `clone`.
        json!({ "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS }),
        only("clone", 0, "SCMP_CMP_MASKED_EQ", CLONE_NEW, Some(0)),
        only("socket", 0, "SCMP_CMP_NE", AF_VSOCK, None),
    ];
    rules.extend(PERSONALITIES.map(|value| only("personality", 0, "SCMP_CMP_EQ", value, None)));
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "syscalls": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_both_allowed_and_refused() {
        let all: Vec<&str> = [FILES, MEMORY, PROCESSES, OTHERS, REFUSED].into_iter().flat_map(str::split_whitespace).collect();
        let mut once = all.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), all.len());
        for call in ["mount", "unshare", "bpf", "ptrace", "keyctl"] {
            assert_eq!(REFUSED.split_whitespace().any(|name| name == call), call != "ptrace", "{call}");
        }
    }
}
