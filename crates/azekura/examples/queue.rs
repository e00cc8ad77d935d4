//! A job queue with two priorities, one producer and two workers. A worker takes the oldest job of the most urgent
//! priority, and moves it to the running jobs in the same transaction. A job leaves the database when it is finished,
//! so a crash repeats jobs and loses none.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{Config, Database, Error, Partition, Result, Slice};

/// The jobs of one priority. Keys are numbers in the order of submission.
struct Priority {
    db: Database,
    /// The number of the next job.
    numbers: Partition,
    waiting: Partition,
    running: Partition,
}

impl Priority {
    /// Jobs that were taken but not finished wait again, in their old places.
    fn open(db: &Database, name: &str) -> Result<Priority> {
        let part = |role| db.open_partition(&format!("{name}: {role}"), Default::default());
        let (numbers, waiting, running) = (part("numbers")?, part("waiting")?, part("running")?);
        db.transact(|tx| {
            for job in tx.iter(&running) {
                let (number, job) = job?;
                tx.insert(&waiting, number, job)?;
            }
            tx.remove_range::<&str>(&running, ..)
        })?;
        Ok(Priority { db: db.clone(), numbers, waiting, running })
    }

    fn push(&self, job: &str) -> Result<()> {
        let number = |bytes: Option<&[u8]>| {
            bytes.map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().expect("a number has 8 bytes")))
        };
        let next = self.numbers.fetch_update("next", |next| Some((number(next) + 1).to_be_bytes()))?;
        self.waiting.insert(number(next.as_deref()).to_be_bytes(), job)
    }

    /// Takes the oldest job. The scan begins where the partition begins: the engine remembers the range of the jobs
    /// that were removed, and seeks past it. If two workers want the same job, the transaction of one is repeated.
    fn take(&self) -> Result<Option<(Slice, Slice)>> {
        self.db.transact(|tx| {
            let Some((number, job)) = tx.first_key_value(&self.waiting)? else { return Ok(None) };
            tx.remove(&self.waiting, &number)?;
            tx.insert(&self.running, &number, &job)?;
            Ok(Some((number, job)))
        })
    }

    fn finish(&self, number: &Slice) -> Result<()> {
        self.running.remove(number)
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
    assert!([&urgent, &normal].iter().all(|jobs| jobs.waiting.is_empty().is_ok_and(|empty| empty)));

    drop((urgent, normal));
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
