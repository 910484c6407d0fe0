//! Whoever was stopped goes on, late writes arrive, collectors run; and what must hold then.

use super::*;

impl History {
    /// One of those who are stopped, or do not know yet that they were replaced, goes on.
    pub fn wake(&mut self) {
        if self.roll(3) == 0 {
            self.deliver();
        }
        if self.roll(2) == 0 && !self.zombies.is_empty() {
            let at = self.roll(self.zombies.len() as u64) as usize;
            let (disk, Writer { volume, plain, .. }) = self.zombies.swap_remove(at);
            let head = self.bucket.object(&keys::head(id(disk)));
            // Nothing that it reads is anything else than what it wrote, until it knows.
            let offset = self.roll(MIB - 5_000);
            let mut into = vec![0; 5_000];
            match volume.read(offset, &mut into) {
                Ok(()) => assert!(into == plain[offset as usize..][..5_000], "volume {disk}: another one's bytes"),
                // What it reads may have been collected since.
                Err(error) => assert!(error.kind() != ErrorKind::InvalidData, "{error}"),
            }
            volume.write(offset / 4096 * 4096, &noise(4096, offset), false).unwrap();
            volume.flush().expect_err("somebody who is out has committed");
            self.out(disk, &volume, head);
            return;
        }
        if self.stopped.is_empty() {
            return;
        }
        let at = self.roll(self.stopped.len() as u64) as usize;
        let (doing, since) = self.stopped.swap_remove(at);
        self.go_on(doing, since);
    }

    pub fn wake_if(&mut self, which: impl Fn(&Doing) -> bool) {
        let (some, others) = std::mem::take(&mut self.stopped).into_iter().partition(|(doing, _)| which(doing));
        self.stopped = others;
        let some: Vec<(Doing, usize)> = some;
        some.into_iter().for_each(|(doing, since)| self.go_on(doing, since));
    }

    /// Somebody who is out: it knows now, and has changed nothing.
    pub fn out(&mut self, disk: u8, volume: &Volume, head: Option<bytes::Bytes>) {
        assert!(matches!(volume.failure(), Some(Failure::Fenced { .. })), "volume {disk}: {:?}", volume.failure());
        for done in [volume.write(0, &[1], false), volume.read(0, &mut [0]), volume.discard(0, 4096)] {
            assert_eq!(done.unwrap_err().kind(), ErrorKind::StaleNetworkFileHandle);
        }
        assert!(self.bucket.object(&keys::head(id(disk))) == head, "volume {disk}: somebody who is out has changed its head");
        self.count.fenced += 1;
    }

    pub fn go_on(&mut self, doing: Doing, since: usize) {
        self.count.woken_after_collection += usize::from(self.collections > since);
        match doing {
            Doing::Flush { disk, writer, work } => {
                let (right, head) = (self.has_right(disk, writer.attach), self.bucket.object(&keys::head(id(disk))));
                let (volume, done) = self.end(work);
                if right {
                    return self.flushed(disk, writer, volume, &done);
                }
                assert!(done.is_err(), "volume {disk}: a commit of somebody who is out");
                self.out(disk, &volume, head);
            }
            Doing::Finish { disk, writer, work } => {
                let (right, head) = (self.has_right(disk, writer.attach), self.bucket.object(&keys::head(id(disk))));
                let done = self.end(work);
                if right {
                    return self.finished(disk, writer, done);
                }
                assert!(done.is_err() && self.bucket.object(&keys::head(id(disk))) == head, "volume {disk}: somebody who is out let it go");
            }
            Doing::Keep { clone, base, job, plain, work } => {
                let done = self.end(work);
                self.kept(clone, base, job, plain, &done);
            }
            Doing::Snapshot { shot, plain, work } => {
                let done = self.end(work);
                self.taken(shot, plain, &done);
            }
            Doing::Collect { work } => {
                self.count.late_collectors += usize::from(self.collections > since);
                if let Ok(done) = self.end(work) {
                    self.count.deleted += done.deleted.0;
                }
                self.check();
            }
        }
    }

    /// Has whoever attached with this still the right to write? It has unless somebody else was given it since: then there is another writer, or was one.
    pub fn has_right(&mut self, disk: u8, attach: u64) -> bool {
        let Some(bytes) = self.bucket.object(&keys::head(id(disk))) else { return false };
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        let (head, _) = volley_volume::format::head::Head::read(id(disk), &keys, &bytes).unwrap();
        self.disks.contains_key(&disk) && head.holder.is_some_and(|holder| holder.attach == u128::from(attach).to_le_bytes())
    }

    pub fn end<T>(&mut self, work: Stopped<T>) -> T {
        self.bucket.release(work.hold);
        let begun = Instant::now();
        while !work.thread.is_finished() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not go on");
            std::thread::sleep(Duration::from_micros(50));
        }
        joined(work.thread)
    }

    pub fn deliver(&mut self) {
        let heads: Vec<_> = self.disks.keys().map(|disk| (*disk, self.bucket.object(&keys::head(id(*disk))))).collect();
        self.bucket.deliver();
        for (disk, head) in heads {
            let now = self.bucket.object(&keys::head(id(disk)));
            assert!(now == head || !self.disks[&disk].perhaps.is_empty(), "volume {disk}: a head that nobody waits for");
        }
    }

    /// Hours pass. A request that was sent arrives within minutes or not at all (its signature is good for 15); whoever is stopped before it sends may sleep for days,
    /// but for one: a snapshot of a state is stored within a day of reading it, or not at all.
    pub fn time(&mut self) {
        self.deliver();
        let hours = [1, 5, 30, 80][self.roll(4) as usize];
        if hours > 5 {
            self.wake_if(|doing| matches!(doing, Doing::Snapshot { .. }));
        }
        self.hours += hours;
    }

    pub fn collect(&mut self) {
        let (known, hours, cluster) = (self.known.clone(), self.hours, self.cluster());
        let busy = self.stopped.iter().any(|(doing, _)| matches!(doing, Doing::Collect { .. }));
        let begin = move || {
            let now_ms = move || {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
                now.as_millis() as u64 + hours * HOUR_MS
            };
            cluster.collect(&Collection { known: &known, name: "a test", dry_run: false, now_ms: &now_ms })
        };
        let trouble = self.roll(2) == 0;
        if trouble {
            let kinds = ["list", "get", "get range", "put", "delete", "delete"];
            self.trouble(&kinds, &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Hold, Fault::Hold, Fault::FlipBit]);
        }
        match run(&self.bucket, begin) {
            Run::Done(Ok(done)) => {
                self.collections += 1;
                self.count.deleted += done.deleted.0;
            }
            Run::Done(Err(CollectError::Busy { .. })) => assert!(busy, "nobody else collects"),
            Run::Done(Err(error)) => assert!(trouble, "{error}"),
            Run::Stopped(work) => self.stopped.push((Doing::Collect { work }, self.collections)),
        }
        if trouble {
            // A run that failed has the lease for an hour.
            self.hours += 1;
        }
        self.check();
    }

    /// Everything that has a name is whole.
    pub fn check(&mut self) {
        let cluster = self.cluster();
        for disk in self.disks.keys() {
            cluster.verify(id(*disk), true).unwrap_or_else(|error| panic!("volume {disk}: {error}"));
        }
        if self.shots.is_empty() {
            return;
        }
        let name = format!("looks-{}", self.fresh());
        let host = self.host(&name);
        for (shot, of) in &self.shots {
            let clone = host.clone_ephemeral(snap(*shot), VolumeId([250; 16]), FlushMode::None, false);
            let clone = clone.unwrap_or_else(|error| panic!("snapshot {shot}: {error}"));
            assert!(read(&clone).unwrap() == of.plain, "snapshot {shot}");
            clone.detach().unwrap();
        }
        std::fs::remove_dir_all(self.dir.path().join(name)).unwrap();
    }

    /// Everybody goes on, everything is read once more, and when nothing has a name nothing is left.
    pub fn end_of_it(mut self) -> Count {
        self.wake_if(|_| true);
        self.deliver();
        while let Some((disk, Writer { volume, .. })) = self.zombies.pop() {
            let head = self.bucket.object(&keys::head(id(disk)));
            volume.write(0, &[1; 4096], false).unwrap();
            volume.flush().expect_err("somebody who is out has committed");
            self.out(disk, &volume, head);
        }
        let disks: Vec<u8> = self.disks.keys().copied().collect();
        for disk in &disks {
            self.disks.get_mut(disk).unwrap().writer = None;
            assert!(self.attach(*disk));
            self.disks.get_mut(disk).unwrap().writer = None;
        }
        self.check();
        for disk in disks {
            self.disks.remove(&disk);
            self.cluster().remove(id(disk), true).unwrap();
        }
        let jobs: Vec<u64> = self.shots.values().flat_map(|shot| shot.jobs.clone()).collect();
        jobs.into_iter().for_each(|job| self.unpin(job));
        self.shots.clear();
        self.known = Known::default();
        for _ in 0..16 {
            self.hours += 60;
            let (known, hours) = (self.known.clone(), self.hours);
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
            let now_ms = move || now + hours * HOUR_MS;
            let done = self.cluster().collect(&Collection { known: &known, name: "a test", dry_run: false, now_ms: &now_ms }).unwrap();
            self.count.deleted += done.deleted.0;
        }
        assert_eq!(self.bucket.keys(), [condemned::KEY], "what nobody needs is left");
        self.count
    }
}
