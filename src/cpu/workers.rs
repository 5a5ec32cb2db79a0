//! The worker threads and their scratch. The tasks of a launch run on them in any order, each with
//! a private buffer. A single worker is the calling thread itself, since waking another and waiting
//! for it costs several microseconds.
//!
//! Each `Cpu` has its own rayon pool, never rayon's global one, which belongs to the host program.
//! Scratch grows to the largest tile that a worker has met and stays, so a repeated launch
//! allocates none.

use super::float_environment::with_default;
use super::memory::HostMemory;
use crate::error::{Error, Result, Status};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

pub struct Workers {
    /// None for a single worker, and after the drop.
    pool: Option<rayon::ThreadPool>,
    threads: Vec<JoinHandle<()>>,
    /// One for each worker, locked for a task. A thread of the pool locks only its own and never
    /// waits. With a single worker, threads that launch at the same time take turns, task by task.
    scratch: Vec<Mutex<HostMemory>>,
}

impl Workers {
    pub fn new(num_threads: usize) -> Result<Workers> {
        let scratch = (0..num_threads).map(|_| HostMemory::new(0).map(Mutex::new)).collect::<Result<_>>()?;
        let mut workers = Workers { pool: None, threads: Vec::new(), scratch };
        if num_threads == 1 {
            return Ok(workers);
        }
        // rayon's own threads end some time after their pool; these can be joined.
        let spawn = |worker: rayon::ThreadBuilder| {
            let thread = std::thread::Builder::new().name(format!("flashtune-{}", worker.index()));
            workers.threads.push(thread.spawn(|| with_default(|| worker.run()))?);
            Ok(())
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).spawn_handler(spawn).build();
        let pool = pool.map_err(|error| {
            Error::new(Status::OutOfMemory, format!("cannot start {num_threads} worker threads: {error}"))
        })?;
        // A thread takes its first memory after its start. Once all have answered, none can meet a
        // system that has no more of it.
        pool.broadcast(|_| {
            let mut first = Vec::<u64>::new();
            let _ = first.try_reserve_exact(1);
            std::hint::black_box(&first);
        });
        workers.pool = Some(pool);
        Ok(workers)
    }

    pub fn count(&self) -> usize {
        self.scratch.len()
    }

    /// Runs `work(task, scratch)` for every task below `tasks` and returns when all are done.
    /// `scratch` has `floats` elements of any value. It fails only if scratch cannot be allocated;
    /// some tasks have then not run.
    pub fn for_each(&self, tasks: usize, floats: usize, work: impl Fn(usize, &mut [f32]) + Sync) -> Result<()> {
        let run = |task: usize, worker: usize| -> Result<()> {
            let mut scratch = self.scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
            if scratch.bytes() < floats * size_of::<f32>() {
                *scratch = HostMemory::new(floats * size_of::<f32>())?;
            }
            work(task, &mut scratch.as_floats_mut()[..floats]);
            Ok(())
        };
        let Some(pool) = &self.pool else {
            return with_default(|| (0..tasks).try_for_each(|task| run(task, 0)));
        };
        let run = |task| run(task, rayon::current_thread_index().expect("tasks run on the pool"));
        pool.install(|| (0..tasks).into_par_iter().with_max_len(1).try_for_each(run))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.pool.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Takes the next `len` floats off the front of a scratch buffer.
pub fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (front, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    front
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn workers_keep_the_subnormals_that_their_caller_flushes() {
        use super::super::float_environment::tests::{SUBNORMAL, computed_subnormal, with_flushed_subnormals};
        for num_threads in [1, 2] {
            let seen = Mutex::new(Vec::new());
            with_flushed_subnormals(|| {
                let workers = Workers::new(num_threads).unwrap();
                let work = |_: usize, _: &mut [f32]| seen.lock().unwrap().push(computed_subnormal().to_bits());
                workers.for_each(4, 1, work).unwrap();
            });
            assert_eq!(seen.into_inner().unwrap(), [SUBNORMAL.to_bits(); 4], "{num_threads} threads");
        }
    }

    #[test]
    fn a_single_worker_is_the_calling_thread_and_more_are_not() {
        let caller = std::thread::current().id();
        for num_threads in [1, 2] {
            let workers = Workers::new(num_threads).unwrap();
            let run = Mutex::new(Vec::new());
            let work = |task: usize, scratch: &mut [f32]| {
                assert_eq!(scratch.len(), 8);
                assert_eq!(std::thread::current().id() == caller, num_threads == 1);
                run.lock().unwrap().push(task);
            };
            workers.for_each(5, 8, work).unwrap();
            let mut run = run.into_inner().unwrap();
            run.sort();
            assert_eq!(run, [0, 1, 2, 3, 4]);
        }
    }
}
