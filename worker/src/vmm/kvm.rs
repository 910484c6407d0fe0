//! What KVM is worth on this host.
//!
//! Owns the look at it: a virtual processor that counts down, under a deadline. A KVM may open, make machines and still emulate each of
//! their instructions (nested virtualisation without hardware for it): software emulation is then the faster one by far. Does not own
//! what is made of the answer.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::spawner::MachineSpawner;

/// Iterations of the loop, two instructions each: 2 ms where they are executed, more than 3 seconds where they are emulated (1.2 million
/// instructions a second were measured).
const ITERATIONS: u32 = 2_000_000;
/// How long they may take: far from both, so that a busy host is not mistaken for an emulating one.
const DEADLINE: Duration = Duration::from_millis(1_000);

/// The loop, in real mode: `mov ecx, ITERATIONS; dec ecx; jnz -4; hlt`.
const CODE_HEAD: [u8; 2] = [0x66, 0xb9];
const CODE_TAIL: [u8; 5] = [0x66, 0x49, 0x75, 0xfc, 0xf4];

/// Exit codes of the look.
const USABLE: i32 = 0;
const CLOSED: i32 = 1;
const BROKEN: i32 = 2;
const FORBIDDEN: i32 = 3;

/// What KVM is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kvm {
    /// It executes.
    Usable,
    /// It emulates, or takes so long that it might as well.
    Emulates,
    /// It is not there.
    Missing,
    /// It is there, and may not be opened.
    Forbidden,
    /// It opens and makes no machine, or one that does not run.
    Broken,
}

impl Kvm {
    /// In words.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Usable => "KVM is usable",
            Self::Emulates => "KVM is there, but emulates every instruction",
            Self::Missing => "there is no KVM (/dev/kvm)",
            Self::Forbidden => "KVM is there, but the worker may not open /dev/kvm; give it that device",
            Self::Broken => "KVM is there, but its machines do not run",
        }
    }
}

/// Looks at KVM, for at most a second.
pub async fn probe(spawner: &MachineSpawner) -> Kvm {
    let Ok(process) = spawner.kvm_probe().await else { return Kvm::Broken };
    match tokio::time::timeout(DEADLINE, process.exited()).await {
        Ok(Ok(exited)) if exited.code == Some(USABLE) => Kvm::Usable,
        Ok(Ok(exited)) if exited.code == Some(CLOSED) => Kvm::Missing,
        Ok(Ok(exited)) if exited.code == Some(FORBIDDEN) => Kvm::Forbidden,
        Ok(_) => Kvm::Broken,
        // Dropped, it is killed.
        Err(_late) => Kvm::Emulates,
    }
}

/// Runs the loop in this process, which then ends with the code returned. It may never come back.
pub fn look() -> i32 {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(kvm) => match count_down(&kvm) {
            Ok(true) => USABLE,
            Ok(false) | Err(_) => BROKEN,
        },
        Err(why) => closed(&why),
    }
}

/// What it means that it can't be opened. A host without the module may have the file all the same.
fn closed(why: &io::Error) -> i32 {
    match why.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => FORBIDDEN,
        _ => CLOSED,
    }
}

/// Requests of linux/kvm.h, and where its structures have what is used here.
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: libc::c_ulong = 0xae04;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;
const KVM_SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
const KVM_RUN: libc::c_ulong = 0xae80;
const KVM_SET_REGS: libc::c_ulong = 0x4090_ae82;
const KVM_GET_SREGS: libc::c_ulong = 0x8138_ae83;
const KVM_SET_SREGS: libc::c_ulong = 0x4138_ae84;
/// `kvm_run.exit_reason` is the third 32-bit word; this one is a `hlt`.
const EXIT_REASON_AT: usize = 8;
const KVM_EXIT_HLT: u32 = 5;
/// `kvm_sregs` begins with the code segment: base (8 bytes), limit (4), selector (2).
const SREGS_BYTES: usize = 312;
const REGS_WORDS: usize = 18;
const RIP_WORD: usize = 16;
const RFLAGS_WORD: usize = 17;
const PAGE: usize = 4096;

#[repr(C)]
struct Region {
    slot: u32,
    flags: u32,
    guest: u64,
    bytes: u64,
    host: u64,
}

/// Does a virtual processor come to the end of the loop?
fn count_down(kvm: &File) -> io::Result<bool> {
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    // SAFETY: requests with the structures that linux/kvm.h gives them, on descriptors and memory that outlive them; the maps are this
    // process's own and live to its end.
    unsafe {
        let made = |fd| OwnedFd::from_raw_fd(fd);
        let vm = made(check(libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0))?);
        let map = |bytes, fd: libc::c_int, kind| {
            let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, kind, fd, 0);
            if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at.cast::<u8>()) }
        };
        let memory = map(PAGE, -1, libc::MAP_SHARED | libc::MAP_ANONYMOUS)?;
        let code: Vec<u8> = CODE_HEAD.into_iter().chain(ITERATIONS.to_le_bytes()).chain(CODE_TAIL).collect();
        std::ptr::copy_nonoverlapping(code.as_ptr(), memory, code.len());
        let region = Region { slot: 0, flags: 0, guest: 0, bytes: PAGE as u64, host: memory as u64 };
        check(libc::ioctl(vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, &raw const region))?;
        let vcpu = made(check(libc::ioctl(vm.as_raw_fd(), KVM_CREATE_VCPU, 0))?);
        let bytes = usize::try_from(check(libc::ioctl(kvm.as_raw_fd(), KVM_GET_VCPU_MMAP_SIZE, 0))?).unwrap_or(PAGE);
        let run = map(bytes, vcpu.as_raw_fd(), libc::MAP_SHARED)?;
        let mut sregs = [0u64; SREGS_BYTES / 8];
        check(libc::ioctl(vcpu.as_raw_fd(), KVM_GET_SREGS, sregs.as_mut_ptr()))?;
        let code_segment = sregs.as_mut_ptr().cast::<u8>();
        // Base and selector 0: the code lies at the beginning of memory.
        code_segment.cast::<u64>().write_unaligned(0);
        code_segment.add(12).cast::<u16>().write_unaligned(0);
        check(libc::ioctl(vcpu.as_raw_fd(), KVM_SET_SREGS, sregs.as_ptr()))?;
        let mut regs = [0u64; REGS_WORDS];
        regs[RIP_WORD] = 0;
        // Bit 1 of the flags is always set.
        regs[RFLAGS_WORD] = 2;
        check(libc::ioctl(vcpu.as_raw_fd(), KVM_SET_REGS, regs.as_ptr()))?;
        check(libc::ioctl(vcpu.as_raw_fd(), KVM_RUN, 0))?;
        Ok(run.add(EXIT_REASON_AT).cast::<u32>().read_volatile() == KVM_EXIT_HLT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_that_may_not_be_opened_is_told_from_none() {
        let code = |errno| closed(&io::Error::from_raw_os_error(errno));
        assert_eq!([libc::EACCES, libc::EPERM, libc::ENOENT, libc::ENXIO].map(code), [FORBIDDEN, FORBIDDEN, CLOSED, CLOSED]);
        assert!(Kvm::Forbidden.as_str().contains("may not open /dev/kvm"));
    }
}
