//! `oncebox new`

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use oncebox_devkit::new_project::{self, Language, NewOptions};

#[derive(Args)]
pub(super) struct NewArgs {
    /// Name of the handler: a-z, 0-9 and `-`
    #[arg(value_parser = new_project::name)]
    name: String,
    /// The language to write it in
    #[arg(long, value_enum)]
    lang: LanguageArg,
    /// Folder to write to; by default one of the handler's name
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// A language that a handler can be written in.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LanguageArg {
    Rust,
    #[value(alias = "ts")]
    Typescript,
    #[value(alias = "js")]
    Javascript,
    Python,
    Go,
    C,
}

impl From<LanguageArg> for Language {
    fn from(language: LanguageArg) -> Self {
        match language {
            LanguageArg::Rust => Self::Rust,
            LanguageArg::Typescript => Self::Typescript,
            LanguageArg::Javascript => Self::Javascript,
            LanguageArg::Python => Self::Python,
            LanguageArg::Go => Self::Go,
            LanguageArg::C => Self::C,
        }
    }
}

pub(super) fn run(args: NewArgs, json: bool) -> Result<()> {
    let NewArgs { name, lang, dir } = args;
    new_project::run(NewOptions { name, lang: lang.into(), dir }, json)
}
