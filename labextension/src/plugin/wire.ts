// Generated from llmdebug_nb/notebook/desk_wire.py by `python labextension/wire_types.py`. Do not edit.

export type Kind = 'run' | 'report';
export type State = 'complete' | 'recording' | 'incomplete';

/** A run on disk, or a report. ``place``: its path as the file browser knows it, "" where Jupyter does not serve it. */
export interface RunRow {
  kind: Kind;
  name: string;
  path: string;
  place: string;
  created: number;
  bytes: number;
  records: number | null;
  steps: number | null;
  state: State;
}

/** A folder of runs or of reports, newest first. */
export interface RunsFolder {
  kind: Kind;
  folder: string;
  runs: RunRow[];
}

/** The runs in ``name`` below each of ``folders``, and the reports in these. */
export interface RunsRequest {
  op: 'runs';
  folders: string[];
  name: string;
}

export interface Runs {
  folders: RunsFolder[];
}

export interface DeleteRequest {
  op: 'delete';
  path: string;
}

export interface Deleted {
  path: string;
}

/** A run or the file of a report (``mine`` ""), or two runs compared. */
export interface OpenRequest {
  op: 'open';
  golden: string;
  mine: string;
}

/** The explorer's code, and the traits that it begins with; or of a file its ``page``, and whether ``scripts`` run in it: ours alone. */
export interface Opened {
  title: string;
  code: string;
  traits: Record<string, unknown>;
  page: string;
  scripts: boolean;
}

/** What each op asks and answers. */
export interface Ops {
  runs: { request: RunsRequest; answer: Runs };
  delete: { request: DeleteRequest; answer: Deleted };
  open: { request: OpenRequest; answer: Opened };
}
