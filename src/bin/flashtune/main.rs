//! The command line for operators, with one file for each command.
//!
//! Results go to standard output, progress and log lines to standard error. Exit codes: 0 success,
//! 1 failure, 2 bad usage, 3 nothing kept (`autotune` and `records import`).

// Its macros are for the modules below.
#[macro_use]
mod output;

mod autotune;
mod bench;
mod choice_error;
mod device;
mod doctor;
mod failure;
mod features;
mod info;
mod memory;
mod model_error;
mod names;
mod pack;
mod places;
mod presets;
mod problems;
mod progress;
mod records;
mod render;
mod report;
mod shell;
mod tuning_log;
mod verify;
mod worker;

use clap::{CommandFactory as _, Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;

/// Exact attention, rendered, compiled and tuned at run time
#[derive(Parser)]
#[command(name = "flashtune", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the candidate configs of a list of problems and keep the fastest of each
    Autotune(autotune::Args),
    /// Say what is missing on this machine, and the command that mends it
    Doctor(doctor::Args),
    /// Show devices, libraries, the cache folder and versions
    Info(info::Args),
    /// Print or compile the kernels of a problem, without a GPU
    Render(render::Args),
    /// Print the kernel that merges partial results, without a GPU
    RenderMerge(render::MergeArgs),
    /// Print the kernel that appends keys and values to a K/V cache, without a GPU
    RenderKvAppend(render::KvAppendArgs),
    /// Compile kernels ahead of time into one file, without a GPU, or show what such a file holds
    Pack(pack::Args),
    /// List, export, import and verify tuning records; show how well they predict one another
    Records(records::Args),
    /// Write one HTML page of what was tuned: candidates, times, limits, winners and reasons
    Report(report::Args),
    /// Time the config that a problem gets
    Bench(bench::Args),
    /// Print a completion script for a shell
    Completions(shell::CompletionsArgs),
    /// Write man pages into a folder
    Man(shell::ManArgs),
    /// Run candidates for `autotune`, which starts this command itself
    #[command(hide = true)]
    Worker(worker::Args),
}

fn main() -> ExitCode {
    // Only our own warnings by default; RUST_LOG enables those of dependencies.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("flashtune=warn"))
        .format_timestamp(None)
        .init();
    let command = Cli::parse().command;
    // `autotune` sees by a signal that a worker has crashed.
    if !matches!(command, Command::Worker(_)) {
        memory::exit_instead_of_abort();
    }
    // A reader that closes the pipe early (`| head`) ends this program quietly, where println would
    // panic. `autotune` must survive a broken pipe, because its workers may crash while it writes
    // to them.
    if !matches!(command, Command::Autotune(_)) {
        // SAFETY: no other thread runs yet, and the default disposition installs no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    let result = match command {
        Command::Autotune(args) => autotune::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Info(args) => info::run(args),
        Command::Render(args) => render::run(args),
        Command::RenderMerge(args) => render::run_merge(args),
        Command::RenderKvAppend(args) => render::run_kv_append(args),
        Command::Pack(args) => pack::run(args),
        Command::Records(args) => records::run(args),
        Command::Report(args) => report::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => shell::completions(args, Cli::command()),
        Command::Man(args) => shell::man(args, Cli::command()),
        Command::Worker(args) => worker::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(message)) => {
            eprintln!("flashtune: {message}");
            ExitCode::from(1)
        }
        Err(Failure::NotKept(message)) => {
            eprintln!("flashtune: {message}");
            ExitCode::from(3)
        }
        Err(Failure::Usage(message)) => {
            eprintln!("flashtune: {message}\nSee flashtune --help.");
            ExitCode::from(2)
        }
    }
}
