//! A job queue with two priorities, one producer and two workers. A worker takes the oldest job of the most urgent
//! partition. A job leaves the database when it is finished, so a crash repeats jobs and loses none.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use std::ops::Bound;
use std::sync::Mutex;

use azekura::{Config, Database, Error, Partition, Result, Slice};

/// The jobs of one priority. Keys are numbers in the order of submission.
struct Priority {
    jobs: Partition,
    /// The number of the next job. The mutex is held until the job is visible: a worker that has taken a later number
    /// would not find an earlier one.
    next: Mutex<u64>,
    /// The key that was taken last. The next scan begins after it, so it does not pass the tombstones of finished jobs.
    taken: Mutex<Vec<u8>>,
}

impl Priority {
    fn open(db: &Database, name: &str) -> Result<Priority> {
        let jobs = db.open_partition(name, Default::default())?;
        // Jobs that were taken but not finished are still there, and are taken again.
        let number = |key: Slice| u64::from_be_bytes((*key).try_into().expect("a key has 8 bytes"));
        let next = jobs.last_key_value()?.map_or(0, |(key, _)| number(key) + 1);
        Ok(Priority { jobs, next: Mutex::new(next), taken: Mutex::default() })
    }

    fn push(&self, job: &str) -> Result<()> {
        let mut next = self.next.lock().expect("no producer panics");
        self.jobs.insert(next.to_be_bytes(), job)?;
        *next += 1;
        Ok(())
    }

    /// Takes the oldest job. The mutex gives each job to one worker.
    fn take(&self) -> Result<Option<(Slice, Slice)>> {
        let mut taken = self.taken.lock().expect("no worker panics");
        let start = if taken.is_empty() { Bound::Unbounded } else { Bound::Excluded(taken.as_slice()) };
        let job = self.jobs.range::<&[u8]>((start, Bound::Unbounded)).next().transpose()?;
        if let Some((key, _)) = &job {
            *taken = key.to_vec();
        }
        Ok(job)
    }

    /// Removes a finished job. Each key is inserted once, as `remove_weak` requires.
    fn finish(&self, key: &Slice) -> Result<()> {
        self.jobs.remove_weak(key)
    }
}

/// Runs jobs until both priorities are empty, and returns their number.
fn work(urgent: &Priority, normal: &Priority) -> Result<u64> {
    let mut done = 0;
    loop {
        let (priority, job) = match urgent.take()? {
            Some(job) => (urgent, job),
            None => match normal.take()? {
                Some(job) => (normal, job),
                None => return Ok(done),
            },
        };
        priority.finish(&job.0)?; // after the work itself, which would be here
        done += 1;
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-queue-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let (urgent, normal) = (Priority::open(&db, "urgent")?, Priority::open(&db, "normal")?);
    (0..2000).try_for_each(|n| normal.push(&format!("letter {n}")))?;
    (0..50).try_for_each(|n| urgent.push(&format!("call {n}")))?;
    assert_eq!(urgent.take()?.expect("there are 50 urgent jobs").1, "call 0");

    // After a restart the job that was taken and not finished is taken again.
    let (urgent, normal) = (Priority::open(&db, "urgent")?, Priority::open(&db, "normal")?);
    let done = std::thread::scope(|scope| {
        let workers = [(); 2].map(|()| scope.spawn(|| work(&urgent, &normal)));
        workers.into_iter().map(|worker| worker.join().expect("no worker panics")).sum::<Result<u64>>()
    })?;
    println!("{done} jobs");
    assert_eq!(done, 2050);
    assert!(urgent.jobs.is_empty()? && normal.jobs.is_empty()?);

    drop((urgent, normal));
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
