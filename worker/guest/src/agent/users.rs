//! Users and groups by name, as the guest's own files have them.
//!
//! Owns reading `/etc/passwd` and `/etc/group`. Directories of users (LDAP and the like) need libraries that a static program can't load.

use std::path::Path;

use super::identity::read_plain;

/// As whom a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// Finds `user` or `user:group`, names or numbers. None when one of them is not there.
#[must_use]
pub fn find(text: &str) -> Option<Ids> {
    // A fifo is not waited for.
    let read = |file| read_plain(Path::new(file)).unwrap_or_default();
    look_up(text, &read("/etc/passwd"), &read("/etc/group"))
}

/// The same in files that were read.
#[must_use]
pub fn look_up(text: &str, passwd: &str, group: &str) -> Option<Ids> {
    let (user, wanted) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    let known = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let (name, uid, gid) = (*fields.first()?, fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        (name == user || user.parse() == Ok(uid)).then_some((name, uid, gid))
    });
    let (name, uid, own) = match known {
        Some(known) => known,
        // A number needs no entry.
        None => ("", user.parse().ok()?, 0),
    };
    let groups: Vec<(&str, u32, &str)> = group
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            Some((*fields.first()?, fields.get(2)?.parse().ok()?, *fields.get(3)?))
        })
        .collect();
    if let Some(wanted) = wanted {
        let found = groups.iter().find(|(name, ..)| *name == wanted).map(|(_, gid, _)| *gid);
        return Some(Ids { uid, gid: found.or_else(|| wanted.parse().ok())?, groups: Vec::new() });
    }
    let member = |members: &&str| !name.is_empty() && members.split(',').any(|member| member == name);
    let further = groups.iter().filter(|(_, _, members)| member(members)).map(|(_, gid, _)| *gid).collect();
    Some(Ids { uid, gid: own, groups: further })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nann:x:1000:1001:Ann:/home/ann:/bin/sh\n";
        let group = "root:x:0:\nstaff:x:50:bob,ann\nann:x:1001:\nannex:x:60:annette\n";
        let ids = |uid, gid, groups: &[u32]| Some(Ids { uid, gid, groups: groups.to_vec() });
        for (text, found) in [
            ("ann", ids(1000, 1001, &[50])),
            ("1000", ids(1000, 1001, &[50])),
            ("ann:staff", ids(1000, 50, &[])),
            ("ann:7", ids(1000, 7, &[])),
            ("4711", ids(4711, 0, &[])),
            ("4711:4712", ids(4711, 4712, &[])),
            ("bob", None),
            ("ann:nobody", None),
            ("", None),
        ] {
            assert_eq!(look_up(text, passwd, group), found, "{text}");
        }
    }
}
