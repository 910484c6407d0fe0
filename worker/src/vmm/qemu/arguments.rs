//! QEMU's command line.
//!
//! Owns it, as a pure function: a machine saved with one must be loaded with the same devices, so both come from here.

use super::super::{Accelerator, PORT_NAME, Size, Slot, Version};

/// Descriptors QEMU inherits, behind the standard streams.
pub const QMP_FD: u32 = 3;
/// The agent's channel.
pub const AGENT_FD: u32 = 4;
/// Memory.
pub const MEMORY_FD: u32 = 5;
/// The root disk; it is always there, as /dev/null where there is no root disk.
pub const ROOT_FD: u32 = 6;
/// Kernel and initial RAM disk, at boot only.
pub const KERNEL_FD: u32 = 7;
/// See [`KERNEL_FD`].
pub const INITRD_FD: u32 = 8;
/// The set of descriptors of the root disk; those of slots come behind it.
pub const ROOT_SET: u32 = 1;

/// The machine type. Its details belong to QEMU's version, which is part of what a snapshot depends on.
pub const MACHINE: &str = "q35";
/// The first version that maps a file it can only read.
pub const READ_ONLY_MEMORY: Version = Version(8, 2, 0);
/// Size of what lies in an empty slot; reads as zeros, takes and forgets what is written.
const EMPTY_BYTES: u64 = 1 << 20;
/// Memory that the translator may take for what it translated, in MiB. QEMU's own bound is 1 GiB; when this is used up it begins anew.
pub const TRANSLATED_MIB: u32 = 128;
/// PCI devices have fixed places, so that the guest finds the disks in order.
const CHANNEL_PLACE: u32 = 3;
const ROOT_PLACE: u32 = 4;
const SLOT_PLACE: u32 = 5;

/// What differs between machines.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a> {
    /// What executes.
    pub accelerator: Accelerator,
    /// Size.
    pub size: Size,
    /// How memory is mapped.
    pub memory: Memory,
    /// Is there a root disk?
    pub root: bool,
    /// Where it begins.
    pub begin: Begin<'a>,
}

/// How memory is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Written to its file: a machine that will be saved.
    Shared,
    /// Read from a file that is opened for writing and can't be written.
    Sealed,
    /// Read from a file that is opened for reading ([`READ_ONLY_MEMORY`]).
    ReadOnly,
}

/// Where a machine begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin<'a> {
    /// At its kernel, with this command line.
    Kernel {
        /// The line.
        line: &'a str,
        /// Is there an initial RAM disk?
        initrd: bool,
    },
    /// At a state that is loaded; it stands still until it is told to go on.
    State,
}

/// The processor model for an accelerator.
#[must_use]
pub fn cpu(accelerator: Accelerator) -> &'static str {
    match accelerator {
        Accelerator::Kvm => "host",
        Accelerator::EmulatingKvm | Accelerator::Tcg => "max",
    }
}

/// The node that a slot's device is attached to.
#[must_use]
pub fn node(slot: Slot) -> &'static str {
    slot.name()
}

/// The whole command line but for the program's name.
#[must_use]
pub fn arguments(arguments: &Arguments<'_>) -> Vec<String> {
    let Arguments { accelerator, size, memory, root, begin } = *arguments;
    let mut line = Line::default();
    // Nothing that isn't named here: no network, display, sound, USB, disk drives, configuration files.
    line.flags(&["-nodefaults", "-no-user-config", "-no-reboot"]);
    line.option("-display", "none");
    // What QEMU itself never needs again is refused by the kernel: a guest that breaks into it can't start programs or change its user.
    line.option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    line.option("-machine", format!("{MACHINE},memory-backend=memory,usb=off,vmport=off"));
    line.option("-accel", if accelerator == Accelerator::Kvm { "kvm".to_owned() } else { format!("tcg,tb-size={TRANSLATED_MIB}") });
    line.option("-cpu", cpu(accelerator));
    line.option("-smp", size.vcpus.to_string());
    let mib = size.memory_bytes >> 20;
    line.option("-m", format!("{mib}M"));
    let how = match memory {
        Memory::Shared => "share=on",
        Memory::Sealed => "share=off",
        Memory::ReadOnly => "share=off,readonly=on,rom=off",
    };
    line.option("-object", format!("memory-backend-file,id=memory,size={mib}M,mem-path=/proc/self/fd/{MEMORY_FD},{how}"));
    line.option("-chardev", "stdio,id=console,signal=off");
    line.option("-serial", "chardev:console");
    line.option("-chardev", format!("socket,id=qmp,fd={QMP_FD}"));
    line.option("-mon", "chardev=qmp,mode=control");
    line.option("-chardev", format!("socket,id=agent,fd={AGENT_FD}"));
    line.option("-device", format!("virtio-serial-pci,id=channel,max_ports=2,addr={CHANNEL_PLACE:#x}"));
    line.option("-device", format!("virtserialport,bus=channel.0,chardev=agent,name={PORT_NAME}"));
    if root {
        line.option("-add-fd", format!("fd={ROOT_FD},set={ROOT_SET}"));
        let file = format!("driver=file,filename=/dev/fdset/{ROOT_SET},locking=off");
        line.option("-blockdev", format!("{file},node-name=root-0,read-only=on,auto-read-only=off"));
        line.option("-blockdev", "driver=raw,node-name=root,file=root-0,read-only=on");
        line.option("-device", format!("virtio-blk-pci,drive=root,serial=root,addr={ROOT_PLACE:#x}"));
    }
    for (slot, place) in Slot::all().into_iter().zip(SLOT_PLACE..) {
        let (node, empty) = (node(slot), slot.content(0));
        line.option("-blockdev", format!("driver=null-co,node-name={empty},read-zeroes=on,size={EMPTY_BYTES}"));
        line.option("-blockdev", format!("driver=raw,node-name={node},file={empty},discard=unmap"));
        // A disk that can't be written, because the host's is full, is an error in the guest. QEMU would stop the machine, and nobody would know.
        let errors = "werror=report,rerror=report";
        // 4 KiB are what the disks behind it read and write; smaller pieces are possible, so that any file system can be mounted.
        let blocks = "physical_block_size=4096,min_io_size=4096,opt_io_size=4096,discard=on";
        line.option("-device", format!("virtio-blk-pci,drive={node},serial={node},{blocks},{errors},addr={place:#x}"));
    }
    match begin {
        Begin::Kernel { line: words, initrd } => {
            line.option("-kernel", format!("/proc/self/fd/{KERNEL_FD}"));
            if initrd {
                line.option("-initrd", format!("/proc/self/fd/{INITRD_FD}"));
            }
            line.option("-append", words);
        }
        Begin::State => {
            line.flags(&["-S"]);
            line.option("-incoming", "defer");
        }
    }
    line.words
}

#[derive(Default)]
struct Line {
    words: Vec<String>,
}

impl Line {
    fn flags(&mut self, flags: &[&str]) {
        self.words.extend(flags.iter().map(|flag| (*flag).to_owned()));
    }

    fn option(&mut self, name: &str, value: impl Into<String>) {
        self.words.extend([name.to_owned(), value.into()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(memory: Memory, root: bool, begin: Begin<'_>) -> Vec<String> {
        let size = Size { vcpus: 2, memory_bytes: 192 << 20 };
        arguments(&Arguments { accelerator: Accelerator::Tcg, size, memory, root, begin })
    }

    #[test]
    fn a_saved_machine_is_loaded_with_the_devices_it_was_booted_with() {
        let devices = |words: Vec<String>| {
            let pairs =
                words.windows(2).filter(|pair| matches!(pair[0].as_str(), "-device" | "-blockdev" | "-machine" | "-cpu" | "-smp" | "-m"));
            pairs.map(|pair| pair.join(" ")).collect::<Vec<_>>()
        };
        let booted = words(Memory::Shared, true, Begin::Kernel { line: "console=ttyS0", initrd: true });
        let loaded = words(Memory::Sealed, true, Begin::State);
        assert_eq!(devices(booted.clone()), devices(loaded.clone()));
        let has = |words: &[String], word: &str| words.iter().any(|found| found == word);
        assert!(has(&booted, "-kernel") && has(&booted, "-initrd") && !has(&booted, "-S"));
        assert!(!has(&loaded, "-kernel") && !has(&loaded, "-initrd") && has(&loaded, "-S"));
    }

    #[test]
    fn everything_that_can_be_refused_is() {
        let words = words(Memory::Shared, false, Begin::State);
        let at = words.iter().position(|word| word == "-sandbox").unwrap();
        assert_eq!(words[at + 1], "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
        assert!(!words.iter().any(|word| word.contains("net") || word.contains("root")), "{words:?}");
    }

    #[test]
    fn memory_is_written_only_where_it_will_be_saved() {
        let backend = |memory| words(memory, true, Begin::State).into_iter().find(|word| word.starts_with("memory-backend")).unwrap();
        assert!(backend(Memory::Shared).ends_with("fd/5,share=on"));
        assert!(backend(Memory::Sealed).ends_with("fd/5,share=off"));
        assert!(backend(Memory::ReadOnly).ends_with("fd/5,share=off,readonly=on,rom=off"));
    }
}
