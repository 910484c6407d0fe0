//! What happens to volumes: writers, jobs, clones and snapshots, each of which may be stopped before any of its requests.

use super::*;

impl History {
    /// Gives the volume to a host on which nobody else has it open.
    pub fn attach(&mut self, disk: u8) -> bool {
        self.settle(disk);
        let taken: Vec<usize> =
            self.zombies.iter().filter(|(of, _)| *of == disk).map(|(_, writer)| writer.host).chain(self.parked(disk)).collect();
        let free: Vec<usize> = (0..HOSTS).filter(|host| !taken.contains(host)).collect();
        let Some(host) = self.pick(&free) else { return false };
        let (attach, sequence) = (self.fresh(), self.fresh());
        let attempt = AttemptName { job: JobId(7), stage: 0, index: 3, number: 1, sequence };
        let resume = self.roll(3) == 0;
        let by = Opener {
            attempt: Some(attempt),
            host: format!("host-{host}"),
            attach: u128::from(attach).to_le_bytes(),
            until_ms: u64::MAX,
            guest: false,
            force: true,
            resume,
        };
        let volume = loop {
            match self.hosts[host].attach(id(disk), &by) {
                Ok(volume) => break volume,
                Err(OpenError::Fetch(_) | OpenError::Busy { .. }) => self.bucket.clear_faults(),
                Err(error) => panic!("volume {disk}: {error}"),
            };
        };
        let found = read(&volume).unwrap();
        let of = self.disks.get_mut(&disk).unwrap();
        if resume {
            assert!(found == of.promised || of.perhaps.contains(&found), "volume {disk}: a state that nobody committed");
        } else {
            assert!(found == of.accepted, "volume {disk}: not what was accepted");
        }
        of.promised.clone_from(&found);
        of.perhaps.clear();
        of.writer = Some(Writer { host, attach, attempt, volume, plain: found });
        true
    }

    /// Hosts where a volume is open in the hands of somebody who is stopped.
    pub fn parked(&self, disk: u8) -> Vec<usize> {
        let of = |doing: &Doing| match doing {
            Doing::Flush { disk: of, writer, .. } | Doing::Finish { disk: of, writer, .. } if *of == disk => Some(writer.host),
            _ => None,
        };
        self.stopped.iter().filter_map(|(doing, _)| of(doing)).collect()
    }

    /// What an attempt left is accepted or given up before the volume is given to the next.
    pub fn settle(&mut self, disk: u8) {
        let Some((promotion, plain)) = self.disks.get_mut(&disk).unwrap().left.take() else { return };
        if self.roll(4) == 0 {
            return;
        }
        self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
        while self.cluster().promote(&promotion).is_err() {
            self.bucket.clear_faults();
        }
        self.bucket.clear_faults();
        // The leader that comes next does it again.
        self.cluster().promote(&promotion).unwrap();
        self.count.promoted += 1;
        let of = self.disks.get_mut(&disk).unwrap();
        of.generation += 1;
        of.accepted = plain;
        (of.promised, of.perhaps) = (of.accepted.clone(), Vec::new());
    }

    /// The writer of some volume. One that has none is given one, unless its last is stopped and not replaced yet.
    pub fn writer(&mut self) -> Option<u8> {
        let disk = self.some_disk()?;
        if self.disks[&disk].writer.is_some() {
            return Some(disk);
        }
        if !self.parked(disk).is_empty() && self.roll(2) == 0 {
            return None;
        }
        self.count.takeovers += usize::from(!self.parked(disk).is_empty());
        self.attach(disk).then_some(disk)
    }

    pub fn write(&mut self) {
        let Some(disk) = self.writer() else { return };
        for _ in 0..=self.roll(3) {
            let (offset, zeros) = (self.roll(MIB - 1), self.roll(6) == 0);
            let longest = if self.roll(2) == 0 { 6_000 } else { 300_000 };
            let len = (1 + self.roll(longest)).min(MIB - offset);
            let bytes = if zeros { vec![0; len as usize] } else { noise(len as usize, self.dice) };
            let Writer { volume, plain, .. } = self.disks.get_mut(&disk).unwrap().writer.as_mut().unwrap();
            let done = if zeros { volume.discard(offset, len) } else { volume.write(offset, &bytes, false) };
            done.unwrap();
            plain[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
            assert!(read(volume).unwrap() == *plain, "volume {disk}: what was written is not read");
        }
    }

    pub fn flush(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        self.trouble(&["put", "put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold, Fault::Hold]);
        let writer = Parked { host, attach, attempt, plain };
        let work = move || {
            let done = volume.flush();
            (volume, done)
        };
        match run(&self.bucket, work) {
            Run::Done((volume, done)) => self.flushed(disk, writer, volume, &done),
            Run::Stopped(work) => {
                // It may still happen.
                self.disks.get_mut(&disk).unwrap().perhaps.push(writer.plain.clone());
                self.stopped.push((Doing::Flush { disk, writer, work }, self.collections));
            }
        }
    }

    /// A flush of whoever has the right has ended.
    pub fn flushed(&mut self, disk: u8, writer: Parked, volume: Volume, done: &io::Result<()>) {
        let of = self.disks.get_mut(&disk).unwrap();
        let Parked { host, attach, attempt, plain } = writer;
        match done {
            Ok(()) => (of.promised, of.perhaps) = (plain.clone(), Vec::new()),
            Err(error) => {
                assert!(volume.failure().is_none(), "out without a takeover: {error}");
                of.perhaps.push(plain.clone());
            }
        }
        of.writer = Some(Writer { host, attach, attempt, volume, plain });
    }

    /// Another host gets the volume, while whoever has it does not know.
    pub fn take_over(&mut self) {
        let Some(disk) = self.some_disk() else { return };
        if let Some(writer) = self.disks.get_mut(&disk).unwrap().writer.take() {
            self.zombies.push((disk, writer));
        }
        if self.attach(disk) {
            self.count.takeovers += 1;
        } else {
            self.kill(disk);
        }
    }

    /// Those of a volume that were replaced are killed, those who are stopped as well as can be: they go on first.
    pub fn kill(&mut self, disk: u8) {
        self.wake_if(|doing| matches!(doing, Doing::Flush { disk: of, .. } | Doing::Finish { disk: of, .. } if *of == disk));
        self.zombies.retain(|(of, _)| *of != disk);
    }

    /// Killed, and opened again by the same attach: the log has everything.
    pub fn restart(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        drop(volume);
        let attach_of = u128::from(attach).to_le_bytes();
        let by = Opener {
            attempt: Some(attempt),
            host: String::new(),
            attach: attach_of,
            until_ms: u64::MAX,
            guest: false,
            force: true,
            resume: true,
        };
        self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
        let volume = loop {
            match self.hosts[host].attach(id(disk), &by) {
                Ok(volume) => break volume,
                Err(OpenError::Fetch(_) | OpenError::Busy { .. }) => self.bucket.clear_faults(),
                Err(error) => panic!("volume {disk}: {error}"),
            };
        };
        self.bucket.clear_faults();
        assert!(read(&volume).unwrap() == plain, "volume {disk}: the log lost something");
        self.disks.get_mut(&disk).unwrap().writer = Some(Writer { host, attach, attempt, volume, plain });
    }

    /// The attempt ends: a last commit, and the volume is let go.
    pub fn finish(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        self.trouble(&["put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Hold, Fault::Hold]);
        let writer = Parked { host, attach, attempt, plain };
        match run(&self.bucket, move || volume.detach()) {
            Run::Done(done) => self.finished(disk, writer, done),
            Run::Stopped(work) => {
                self.disks.get_mut(&disk).unwrap().perhaps.push(writer.plain.clone());
                self.stopped.push((Doing::Finish { disk, writer, work }, self.collections));
            }
        }
    }

    pub fn finished(&mut self, disk: u8, writer: Parked, done: Result<(Content, u64), OpenError>) {
        let of = self.disks.get_mut(&disk).unwrap();
        match done {
            Ok((content, generation)) => {
                assert_eq!(generation, of.generation, "volume {disk}");
                let promotion = Promotion { volume: id(disk), attempt: Some(writer.attempt), base: generation, root: content.digest() };
                (of.promised, of.perhaps) = (writer.plain.clone(), Vec::new());
                of.left = Some((promotion, writer.plain));
                // Most often at once; otherwise collections see it as it is.
                if self.roll(3) > 0 {
                    self.settle(disk);
                }
            }
            // The attempt failed: what it had committed may be gone on with, by whoever asks for that.
            Err(_) => of.perhaps.push(writer.plain),
        }
    }

    pub fn snapshot(&mut self) {
        let Some(disk) = self.some_disk() else { return };
        self.settle(disk);
        let (shot, cluster) = (self.fresh_id(), self.cluster());
        let plain = self.disks[&disk].accepted.clone();
        let (named, job) = (self.roll(2) == 0, self.fresh());
        if named {
            self.known.snapshots.insert(snap(shot));
        } else {
            // As when a job is accepted: it is known from then on, and pinned first.
            while cluster.pin(&format!("j{job}"), Pinned::Accepted(id(disk), snap(shot))).is_err() {}
            self.shots.insert(shot, Shot { plain, named, jobs: vec![job] });
            return;
        }
        self.trouble(&["put"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold]);
        match run(&self.bucket, move || cluster.snapshot_accepted(id(disk), snap(shot))) {
            Run::Done(done) => self.taken(shot, plain, &done),
            Run::Stopped(work) => self.stopped.push((Doing::Snapshot { shot, plain, work }, self.collections)),
        }
    }

    pub fn taken(&mut self, shot: u8, plain: Vec<u8>, done: &Result<(), OpenError>) {
        match done {
            Ok(()) => drop(self.shots.insert(shot, Shot { plain, named: true, jobs: Vec::new() })),
            Err(_) => drop(self.known.snapshots.remove(&snap(shot))),
        }
    }

    /// A copy: one that has a name at once, or a task's own, which is kept or not.
    pub fn clone(&mut self) {
        let Some(base) = self.some_shot() else { return };
        if self.disks.len() >= DISKS + 2 {
            return;
        }
        let (clone, job, host) = (self.fresh_id(), self.fresh(), self.roll(HOSTS as u64) as usize);
        let mut plain = self.shots[&base].plain.clone();
        if self.roll(3) == 0 {
            self.cluster().clone_named(snap(base), id(clone), FlushMode::S3).unwrap();
            return self.named(clone, plain);
        }
        let owner = format!("j{job}");
        self.cluster().pin(&owner, Pinned::Snapshot(snap(base))).unwrap();
        self.shots.get_mut(&base).unwrap().jobs.push(job);
        let volume = self.hosts[host].clone_ephemeral(snap(base), id(clone), FlushMode::S3, false).unwrap();
        for _ in 0..self.roll(3) {
            let longest = if self.roll(2) == 0 { 6_000 } else { 300_000 };
            let (offset, len) = (self.roll(MIB / 2) as usize, self.roll(longest) as usize);
            let bytes = noise(len, self.dice);
            volume.write(offset as u64, &bytes, false).unwrap();
            plain[offset..offset + len].copy_from_slice(&bytes);
            assert!(read(&volume).unwrap() == plain, "copy {clone}");
        }
        if self.roll(4) == 0 {
            volume.detach().unwrap();
            return self.unpin(job);
        }
        self.trouble(&["put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold, Fault::Hold]);
        match run(&self.bucket, move || volume.keep()) {
            Run::Done(done) => self.kept(clone, base, job, plain, &done),
            Run::Stopped(work) => self.stopped.push((Doing::Keep { clone, base, job, plain, work }, self.collections)),
        }
    }

    pub fn kept(&mut self, clone: u8, base: u8, job: u64, plain: Vec<u8>, done: &Result<Content, OpenError>) {
        let pinned = self.shots.get(&base).is_some_and(|shot| shot.jobs.contains(&job));
        self.count.kept += usize::from(done.is_ok() && pinned);
        self.count.too_late += usize::from(!pinned);
        // The log accepts no result of an attempt that was given up.
        if done.is_ok() && pinned {
            self.named(clone, plain);
        }
        if pinned {
            self.unpin(job);
        }
    }

    pub fn unpin(&mut self, job: u64) {
        self.cluster().unpin(&format!("j{job}")).unwrap();
        self.shots.values_mut().for_each(|shot| shot.jobs.retain(|of| *of != job));
        self.shots.retain(|_, shot| shot.named || !shot.jobs.is_empty());
    }

    /// A name goes, or a job ends, whatever is still done for it.
    pub fn forget(&mut self) {
        if self.roll(2) == 0
            && let Some(disk) = self.some_disk().filter(|_| self.disks.len() > 1)
        {
            let of = self.disks.remove(&disk).unwrap();
            self.zombies.extend(of.writer.map(|writer| (disk, writer)));
            self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
            while self.cluster().remove(id(disk), true).is_err() {
                self.bucket.clear_faults();
            }
            self.bucket.clear_faults();
            self.known.volumes.remove(&id(disk));
            return;
        }
        // A job ends whose attempt is stopped in the middle of keeping its copy.
        let late = self.stopped.iter().find_map(|(doing, _)| match doing {
            Doing::Keep { job, .. } => Some(*job),
            _ => None,
        });
        if let Some(job) = late {
            return self.unpin(job);
        }
        let Some(shot) = self.some_shot() else { return };
        let of = self.shots.get_mut(&shot).unwrap();
        if of.named {
            of.named = false;
            self.known.snapshots.remove(&snap(shot));
            self.shots.retain(|_, shot| shot.named || !shot.jobs.is_empty());
        } else if let Some(job) = of.jobs.first().copied() {
            self.unpin(job);
        }
    }
}
