//! What a worker has to offer: which isolation tiers can be had on this host, and what each of them is made of.
//!
//! Owns the order in which that is found out, and what becomes of a tier that can't be had: it is left out, said once at the start, and told to
//! the coordinator with the reason; it is an error where nothing else is offered, or where a VMM was asked for by name. Does not own any tier
//! (`runtime`).

use std::sync::Arc;

use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::work::Lack;

use crate::cgroup::{CgroupError, Cgroups};
use crate::config::Config;
use crate::containers::{Containers, ContainersError};
use crate::error::{RunError, chain};
use crate::image::Store;
use crate::machines::{Machines, MachinesError};
use crate::place::Place;
use crate::spawner::Spawner;
use crate::users;
use crate::vmm::choice::Choice;

/// What there is.
pub struct Offer {
    /// The worker's directory.
    pub place: Place,
    /// Limits of what runs on the host.
    pub cgroups: Option<Arc<Cgroups>>,
    /// Can limits be enforced, in every tier that is offered?
    pub limits: bool,
    /// Starts processes and containers.
    pub spawner: Option<Spawner>,
    /// Are processes offered?
    pub processes: bool,
    /// Containers, if they are offered.
    pub containers: Option<Arc<Containers>>,
    /// Machines, if they are offered.
    pub machines: Option<Arc<Machines>>,
    /// What was to be offered and can't be had.
    pub lacks: Vec<Lack>,
}

impl Offer {
    /// Finds out what there is of what is to be offered, takes the worker's directory, and says in `config` what is left.
    ///
    /// # Errors
    /// [`RunError`].
    pub async fn open(config: &mut Config, spawner: Option<Spawner>) -> Result<Self, RunError> {
        let without_users = give_containers_users(config);
        let processes = config.isolation.contains(&Isolation::Process);
        let on_host = processes || config.isolation.contains(&Isolation::Container);
        let spawner = match spawner.filter(|_| on_host) {
            Some(spawner) => Some(spawner),
            None if on_host => Some(Spawner::start()?),
            None => None,
        };
        let with_machines = config.isolation.contains(&Isolation::Microvm);
        let (place, cgroups) = take_place(config, spawner.as_ref(), on_host, with_machines).await?;
        let (containers, refused) = match open_containers(config, &place, spawner.as_ref()).await {
            Ok(containers) => (containers, without_users),
            Err(why) => (None, Some(why)),
        };
        let mut lacks = Vec::new();
        if let Some(why) = refused {
            lacks.push(lack(config, Isolation::Container, why)?);
        }
        let opened = if with_machines {
            Machines::open(&config.machines, &place.dir.join("machines"), config.slots, cgroups.clone()).await.map(Some)
        } else {
            Ok(None)
        };
        let machines = match opened {
            Ok(machines) => machines.map(Arc::new),
            // It was named, so it is meant.
            Err(why @ MachinesError::Vmm(_)) if config.machines.vmm != Choice::Auto => return Err(why.into()),
            Err(why) => {
                lacks.push(lack(config, Isolation::Microvm, why)?);
                None
            }
        };
        // A machine limits what runs in it without any help of the host's.
        let limits = cgroups.is_some() || !on_host && machines.is_some();
        Ok(Self { place, cgroups, limits, spawner, processes, containers, machines, lacks })
    }

    /// Its images, if it offers a tier that has any.
    #[must_use]
    pub fn images(&self) -> Option<Store> {
        let (machines, containers) = (self.machines.as_ref(), self.containers.as_ref());
        machines.map(|machines| machines.store()).or_else(|| containers.map(|containers| containers.store())).cloned()
    }
}

/// Leaves a tier out that can't be had, and says so. An error where it was all there was to offer.
fn lack<E>(config: &mut Config, tier: Isolation, why: E) -> Result<Lack, RunError>
where
    E: std::error::Error + 'static,
    RunError: From<E>,
{
    config.isolation.retain(|other| *other != tier);
    if config.isolation.iter().all(|tier| *tier == Isolation::Null) {
        return Err(why.into());
    }
    let lack = Lack::new(tier, &chain(&why));
    tracing::warn!("isolation \"{}\" is not offered, though it was asked for: {}", tier.as_str(), lack.why);
    Ok(lack)
}

/// Containers never run as root on the host: where nobody was named, each slot has a user of its own. What is in the way, if anything.
fn give_containers_users(config: &mut Config) -> Option<ContainersError> {
    if !config.isolation.contains(&Isolation::Container) || config.task_user.is_some_and(|(uid, _)| uid != 0) {
        return None;
    }
    let given = match rustix::process::geteuid().is_root() {
        true => users::for_slots(config.slots).map_err(ContainersError::from),
        false => Err(ContainersError::NotRoot),
    };
    match given {
        Ok(first) => {
            (config.task_user, config.task_user_per_slot) = (Some(first), true);
            None
        }
        Err(why) => {
            config.isolation.retain(|tier| *tier != Isolation::Container);
            Some(why)
        }
    }
}

/// What containers are made of, if they are offered.
async fn open_containers(config: &Config, place: &Place, spawner: Option<&Spawner>) -> Result<Option<Arc<Containers>>, ContainersError> {
    let (true, Some(spawner), Some(user)) = (config.isolation.contains(&Isolation::Container), spawner, config.task_user) else {
        return Ok(None);
    };
    let containers = Containers::open(&config.containers, &config.machines, &place.dir.join("containers"), spawner, user).await?;
    tracing::info!("containers are run by {}", containers.runtime.name);
    Ok(Some(Arc::new(containers)))
}

/// Takes the directory and the cgroups, with nothing of a predecessor left in either.
async fn take_place(
    config: &Config,
    spawner: Option<&Spawner>,
    on_host: bool,
    with_machines: bool,
) -> Result<(Place, Option<Arc<Cgroups>>), RunError> {
    let (dir, want_cgroups) = (config.dir.clone(), config.cgroups && (on_host || with_machines));
    let other_user = config.task_user.filter(|(uid, _)| on_host && *uid != 0);
    let zygote = spawner.map(Spawner::pid);
    let taken = tokio::task::spawn_blocking(move || {
        let mut place = Place::take(&dir)?;
        if other_user.is_some()
            && let Some(closed) = users::closed_above(&place.dir)
        {
            return Err(RunError::Closed { dir: place.dir, closed });
        }
        let cgroups = if want_cgroups {
            // Named by the directory, which one worker holds at a time, so what is in it is a predecessor's.
            let hash = blake3::hash(place.dir.as_os_str().as_encoded_bytes()).to_hex();
            match Cgroups::open(&format!("volley-{}", hash.get(..12).unwrap_or_default())) {
                Ok(cgroups) => Some(Arc::new(cgroups)),
                Err(why @ CgroupError::Alive { .. }) => return Err(why.into()),
                Err(why) => {
                    let what = match on_host {
                        true => "no limits can be enforced; tasks that ask for cpu, memory or pids limits are refused",
                        false => "machines have no cgroups of their own; what they use is limited by what they are made with only",
                    };
                    tracing::warn!(%why, "{what}");
                    None
                }
            }
        } else {
            None
        };
        place.note(zygote)?;
        Ok((place, cgroups))
    });
    taken.await.unwrap_or_else(|e| Err(RunError::Predecessor(e.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_cant_be_had_is_left_out_unless_it_is_all() {
        let config = |isolation: &[Isolation]| {
            let mut config = Config::new("w".parse().unwrap(), "/nowhere".into());
            config.isolation = isolation.to_vec();
            config
        };
        let missing = || ContainersError::NotRoot;
        let mut both = config(&[Isolation::Process, Isolation::Container]);
        let left = lack(&mut both, Isolation::Container, missing()).unwrap();
        assert_eq!((left.tier, left.why.as_str()), (Isolation::Container, missing().to_string().as_str()));
        assert_eq!(both.isolation, [Isolation::Process]);
        for alone in [&[Isolation::Container][..], &[Isolation::Null, Isolation::Container]] {
            assert!(matches!(lack(&mut config(alone), Isolation::Container, missing()), Err(RunError::Containers(_))));
        }
    }
}
