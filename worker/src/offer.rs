//! What a worker has to offer: which isolation tiers can be had on this host, and what each of them is made of.
//!
//! Owns the order in which that is found out, and what becomes of a tier that can't be had: machines that are offered and can't be made are
//! an error, containers are left out and said to be, unless nothing else is offered. Does not own any tier (`runtime`).

use std::sync::Arc;

use volley_jobspecs::wire::plan::Isolation;

use crate::cgroup::{CgroupError, Cgroups};
use crate::config::Config;
use crate::containers::{Containers, ContainersError};
use crate::error::{RunError, chain};
use crate::machines::Machines;
use crate::place::Place;
use crate::spawner::Spawner;
use crate::users;

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
        if let Some(why) = refused {
            config.isolation.retain(|tier| *tier != Isolation::Container);
            if config.isolation.iter().all(|tier| *tier == Isolation::Null) {
                return Err(why.into());
            }
            tracing::warn!("isolation \"container\" is not offered: {}", chain(&why));
        }
        let machines = if with_machines {
            let dir = place.dir.join("machines");
            Some(Arc::new(Machines::open(&config.machines, &dir, config.slots, cgroups.clone()).await?))
        } else {
            None
        };
        // A machine limits what runs in it without any help of the host's.
        let limits = cgroups.is_some() || !on_host && machines.is_some();
        Ok(Self { place, cgroups, limits, spawner, processes, containers, machines })
    }
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
