//! What shapes a template, and the name that follows from it.
//!
//! Owns the encoding that is hashed: each field with its number and length, so that two recipes with one name are the same. Pure.

use std::fmt;

use volley_jobspecs::ids::TenantId;

use crate::image::oci::Digest;
use crate::vmm::{Identity, SLOTS, Size};

/// Changes when the encoding does, or what is done with a recipe.
const FORMAT: u32 = 3;

/// Whose a template is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Everybody's; only an operator makes such ones.
    Public,
    /// One tenant's.
    Tenant(TenantId),
}

/// A command that is run before a machine is saved. It sees no secrets, items or files but the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmUp {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its environment, besides the image's and what every command has.
    pub env: Vec<(String, String)>,
}

/// Everything that shapes a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// Whose it is.
    pub owner: Owner,
    /// The image's digest.
    pub image: Digest,
    /// The SHA-256 of its root disk.
    pub root: Digest,
    /// The kernel's BLAKE3.
    pub kernel: [u8; 32],
    /// The BLAKE3 of the initial RAM disk: agent and modules.
    pub initrd: [u8; 32],
    /// Words for the kernel's command line.
    pub words: String,
    /// The machine's size.
    pub size: Size,
    /// What is run before it is saved, in this order.
    pub warm_up: Vec<WarmUp>,
    /// Do processes that the warm-up left live on in every machine? They then share what they drew from the generator before.
    pub keep_processes: bool,
    /// The VMM: version, machine type, accelerator, processor model, list of devices.
    pub vmm: Identity,
    /// The host's processor, where the guest's depends on it ([`crate::vmm::processor`]); empty where it is emulated.
    pub processor: String,
}

/// A template's name: the BLAKE3 of its recipe.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateName(pub [u8; 32]);

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Recipe {
    /// The template's name.
    #[must_use]
    pub fn name(&self) -> TemplateName {
        // All fields, by name: one that is added is not forgotten here.
        let Self { owner, image, root, kernel, initrd, words, size, warm_up, keep_processes, vmm, processor } = self;
        let Size { vcpus, memory_bytes } = size;
        let Identity { vmm: kind, version, accelerator, machine, cpu, format } = vmm;
        let mut fields = Fields(blake3::Hasher::new_derive_key("volley template name"));
        match owner {
            Owner::Public => fields.put(0, b""),
            Owner::Tenant(tenant) => fields.put(1, tenant.as_str().as_bytes()),
        }
        fields.number(2, FORMAT.into());
        fields.put(3, image.hex().as_bytes());
        fields.put(4, root.hex().as_bytes());
        fields.put(5, kernel);
        fields.put(6, initrd);
        fields.put(7, words.as_bytes());
        fields.number(8, (*vcpus).into());
        fields.number(9, *memory_bytes);
        fields.number(10, warm_up.len() as u64);
        for WarmUp { argv, env } in warm_up {
            fields.number(11, argv.len() as u64);
            argv.iter().for_each(|word| fields.put(12, word.as_bytes()));
            fields.number(13, env.len() as u64);
            for (name, value) in env {
                fields.put(14, name.as_bytes());
                fields.put(15, value.as_bytes());
            }
        }
        fields.number(16, (*keep_processes).into());
        fields.put(17, kind.to_string().as_bytes());
        fields.put(18, version.to_string().as_bytes());
        fields.put(19, accelerator.as_str().as_bytes());
        fields.put(20, machine.as_bytes());
        fields.put(21, cpu.as_bytes());
        fields.number(22, (*format).into());
        fields.number(23, SLOTS as u64);
        fields.put(24, processor.as_bytes());
        TemplateName(*fields.0.finalize().as_bytes())
    }
}

/// A hash of fields. Each is its number, its length and its bytes, so that none runs into the next.
struct Fields(blake3::Hasher);

impl Fields {
    fn put(&mut self, number: u32, bytes: &[u8]) {
        self.0.update(&number.to_le_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }

    fn number(&mut self, number: u32, value: u64) {
        self.put(number, &value.to_le_bytes());
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::vmm::{Accelerator, Kind, Version};

    fn digest(byte: u8) -> Digest {
        Digest::parse(&format!("sha256:{}", hex::encode([byte; 32]))).unwrap()
    }

    prop_compose! {
        fn warm_up()(argv in proptest::collection::vec("[a-c]{0,2}", 0..3), env in proptest::collection::vec(("[A-B]", "[a-b]{0,2}"), 0..3))
            -> WarmUp { WarmUp { argv, env } }
    }

    prop_compose! {
        pub fn recipe()(
            tenant in proptest::option::of("[a-b]{1,2}"), bytes in proptest::collection::vec(0u8..2, 4), words in "[a-b ]{0,2}",
            (vcpus, memory) in (1u8..3, 1u64..3), warm_up in proptest::collection::vec(warm_up(), 0..3), keep_processes: bool,
            (kind, version, accelerator, cpu) in (any::<bool>(), 0u16..2, any::<bool>(), any::<bool>()), format in 0u32..2,
        ) -> Recipe {
            Recipe {
                owner: tenant.map_or(Owner::Public, |tenant| Owner::Tenant(TenantId::new(&tenant).unwrap())),
                image: digest(bytes[0]), root: digest(bytes[1]), kernel: [bytes[2]; 32], initrd: [bytes[3]; 32], words,
                size: Size { vcpus, memory_bytes: memory << 20 }, warm_up, keep_processes,
                vmm: Identity {
                    vmm: if kind { Kind::Qemu } else { Kind::Firecracker }, version: Version(version, 0, 0),
                    accelerator: if accelerator { Accelerator::Kvm } else { Accelerator::Tcg },
                    machine: if kind { "q35" } else { "microvm" }, cpu: if cpu { "max" } else { "host" }, format,
                },
                processor: if cpu { String::new() } else { "some".into() },
            }
        }
    }

    /// A recipe in which one field is another.
    fn changed(recipe: &Recipe, field: usize) -> Recipe {
        let mut new = recipe.clone();
        match field {
            0 => new.owner = Owner::Tenant(TenantId::new("other").unwrap()),
            1 => new.image = digest(9),
            2 => new.root = digest(9),
            3 => new.kernel = [9; 32],
            4 => new.initrd = [9; 32],
            5 => new.words.push('!'),
            6 => new.size.vcpus += 9,
            7 => new.size.memory_bytes += 1 << 30,
            8 => new.warm_up.push(WarmUp { argv: vec!["x".into()], env: Vec::new() }),
            9 => new.keep_processes = !new.keep_processes,
            10 => new.vmm.version.2 += 1,
            11 => new.vmm.accelerator = Accelerator::EmulatingKvm,
            12 => new.vmm.machine = "other",
            13 => new.vmm.cpu = "other",
            14 => new.vmm.format += 9,
            15 => new.processor.push('!'),
            _ => new.vmm.vmm = if new.vmm.vmm == Kind::Qemu { Kind::Firecracker } else { Kind::Qemu },
        }
        new
    }

    proptest! {
        #[test]
        fn every_field_changes_the_name(recipe in recipe()) {
            let mut names: Vec<TemplateName> = (0..17).map(|field| changed(&recipe, field).name()).collect();
            names.push(recipe.name());
            names.sort();
            names.dedup();
            prop_assert_eq!(names.len(), 18);
        }

        #[test]
        fn one_name_is_one_recipe(one in recipe(), other in recipe()) {
            prop_assert_eq!(one == other, one.name() == other.name());
        }
    }

    #[test]
    fn words_do_not_run_into_each_other() {
        let with = |argv: &[&str], env: &[(&str, &str)]| {
            let own = |text: &&str| (*text).to_owned();
            WarmUp { argv: argv.iter().map(own).collect(), env: env.iter().map(|(n, v)| (own(n), own(v))).collect() }
        };
        let base =
            proptest::strategy::ValueTree::current(&recipe().new_tree(&mut proptest::test_runner::TestRunner::deterministic()).unwrap());
        let name = |warm_up: Vec<WarmUp>| Recipe { warm_up, ..base.clone() }.name();
        let all = [
            name(vec![with(&["ab", "c"], &[])]),
            name(vec![with(&["a", "bc"], &[])]),
            name(vec![with(&["abc"], &[])]),
            name(vec![with(&["ab"], &[("c", "")])]),
            name(vec![with(&["ab"], &[]), with(&["c"], &[])]),
        ];
        let distinct: std::collections::BTreeSet<_> = all.into_iter().collect();
        assert_eq!(distinct.len(), 5);
    }
}
