//! What the machine uses.
//!
//! Owns reading it from /proc.

use std::fs;

use volley_jobspecs::wire::guest::Stats;

/// Unit of /proc/stat, in milliseconds: USER_HZ is 100 on every Linux there is.
const TICK_MS: u64 = 10;

/// All of it; what can't be read is 0.
pub fn read() -> Stats {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| memory.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
    let bytes = |name: &str| kib(name).unwrap_or_default() * 1024;
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or_default();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit)).count();
    let root = rustix::fs::statvfs("/");
    Stats {
        memory_total_bytes: bytes("MemTotal:"),
        memory_available_bytes: bytes("MemAvailable:"),
        cpu_busy_ms: busy_ticks(&fs::read_to_string("/proc/stat").unwrap_or_default()) * TICK_MS,
        // Uptime is far below 2^53 milliseconds and never negative.
        uptime_ms: std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default().as_millis().try_into().unwrap_or_default(),
        processes: u32::try_from(processes).unwrap_or(u32::MAX),
        root_bytes: root.as_ref().map_or(0, |root| root.f_blocks.saturating_mul(root.f_frsize)),
        root_free_bytes: root.as_ref().map_or(0, |root| root.f_bavail.saturating_mul(root.f_frsize)),
        unix_ns: super::identity::now(),
    }
}

/// Of the first line: user, nice, system, irq, softirq, steal; not idle and iowait, nor the guests counted in user.
fn busy_ticks(stat: &str) -> u64 {
    let numbers: Vec<u64> = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    [0, 1, 2, 5, 6, 7].into_iter().filter_map(|at| numbers.get(at)).sum()
}

#[test]
fn idle_time_is_not_busy() {
    assert_eq!(busy_ticks("cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 9 9 9\n"), 63);
}
