-- What every step on a rollout shares; scripts.py puts it in front of each of them, after
-- a line that defines FORMAT (the newest format this version reads) and STATE (the names
-- of the state fields, from keys.py).
--
-- Reply of every step: {code, incarnation, seq, version, ...}.
-- Errors of every step: CORRUPT, NEWER, and Redis' own WRONGTYPE. All come before any write.

local key = KEYS[1]

local NUMBERS = {'format', 'version', 'seq', 'records', 'intents', 'failures', 'refusals', 'blocks', 'bytes'}

local MAX_NUMBER = 2 ^ 53

-- A snapshot id is given by the freeze and stays; a rollout may be retired without one.
local function valid_status(state)
  local status, snapshot = state.status, state.snapshot
  if not string.find(state.incarnation, '^[%w-]+$') then return false end
  if status == 'open' then return snapshot == '' end
  if status == 'retired' and snapshot == '' then return true end
  return (status == 'frozen' or status == 'retired') and string.find(snapshot, '^[%w-]+$') ~= nil
end

-- The rollout's state as a table, or nil where there is none; the second value is an error.
local function load_state()
  local fields = {}
  for i, name in ipairs(STATE) do fields[i] = 's:' .. name end
  local values = redis.call('HMGET', key, unpack(fields))
  local state, present = {}, 0
  for i, name in ipairs(STATE) do
    state[name] = values[i]
    if values[i] then present = present + 1 end
  end
  if present == 0 and redis.call('EXISTS', key) == 0 then return nil, nil end
  if present < #STATE then
    return nil, redis.error_reply('CORRUPT the state of the rollout lacks ' .. (#STATE - present) .. ' fields')
  end
  for _, name in ipairs(NUMBERS) do
    local number = tonumber(state[name])
    if not number then
      return nil, redis.error_reply('CORRUPT the state field ' .. name .. ' is not a number')
    end
    if name == 'format' and number > FORMAT then return nil, redis.error_reply('NEWER ' .. number) end
    if number < 0 or number > MAX_NUMBER or number ~= math.floor(number) then
      return nil, redis.error_reply('CORRUPT the state field ' .. name .. ' is not a count')
    end
    state[name] = number
  end
  if not valid_status(state) then
    return nil, redis.error_reply('CORRUPT the status, snapshot and incarnation do not go together')
  end
  return state, nil
end

local function store_state(state)
  local pairs_ = {}
  for _, name in ipairs(STATE) do
    pairs_[#pairs_ + 1] = 's:' .. name
    pairs_[#pairs_ + 1] = state[name]
  end
  redis.call('HSET', key, unpack(pairs_))
end

local function create_state(incarnation)
  local state = {
    format = FORMAT, incarnation = incarnation, status = 'open', version = 0, snapshot = '', seq = 0,
    records = 0, intents = 0, failures = 0, refusals = 0, blocks = 0, bytes = 0, ends = '',
  }
  store_state(state)
  return state
end

local function reply(code, state, ...)
  if not state then return {code, '', 0, 0, ...} end
  return {code, state.incarnation, state.seq, state.version, ...}
end

-- Writes the failure of a call, as one step. The first reason stays: a put that met a conflict is
-- followed by a mark of the same call, which knows less.
local function mark_failure(state, call, failure_code)
  local now = redis.call('TIME')
  local failed_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  local field = 'f:' .. call
  state.failures = state.failures
    + redis.call('HSETNX', key, field, string.format('%.0f ', failed_ms) .. failure_code)
  state.seq = state.seq + 1
  state.version = state.version + 1
  redis.call('HSET', key, 'o:' .. state.seq, '0:' .. field,
    's:seq', state.seq, 's:version', state.version, 's:failures', state.failures)
end

-- 1 if the rollout holds an entry, a mark or an intent, else 0.
local function holds(state)
  return state.records + state.failures + state.intents > 0 and 1 or 0
end

-- Replaces the rollout by its tombstone.
local function retire(state, ttl_s)
  redis.call('UNLINK', key)
  state.status = 'retired'
  state.records, state.intents, state.failures, state.refusals = 0, 0, 0, 0
  state.blocks, state.bytes, state.ends = 0, 0, ''
  store_state(state)
  redis.call('EXPIRE', key, ttl_s)
end

-- Appends what the steps from number `from` on wrote to `rows`, up to about max_bytes and 1,000 steps:
-- {what the step wrote, its value, its index row (of a record), names of the blocks it brought, the blocks}.
-- Returns the number to go on from.
local function collect_rows(state, from, max_bytes, rows)
  local bytes, seq, last = 0, from, math.min(state.seq, from + 999)
  while seq <= last and (bytes < max_bytes or seq == from) do
    local trace = redis.call('HGET', key, 'o:' .. seq)
    local count, rest = string.match(trace or '', '^(%d+):(.*)$')
    local names_end = 16 * (tonumber(count) or 0)
    if rest and names_end > #rest then rest = nil end -- a damaged count must not be counted to
    local field, names = trace, ''
    if rest then field, names = string.sub(rest, names_end + 1), string.sub(rest, 1, names_end) end
    local value, index, blocks = false, false, {}
    if rest then
      if string.sub(field, 1, 2) == 'r:' then
        local size = redis.call('HSTRLEN', key, field) + 64 * names_end
        if bytes > 0 and bytes + size > max_bytes then break end
        index = redis.call('HGET', key, 'i:' .. string.sub(field, 3))
      end
      value = redis.call('HGET', key, field)
      bytes = bytes + (value and #value or 0)
      for at = 1, names_end, 16 do
        local block = redis.call('HGET', key, 'b:' .. string.sub(names, at, at + 15))
        blocks[#blocks + 1] = block
        bytes = bytes + (block and #block or 0)
      end
    end
    rows[#rows + 1] = {field, value, index, names, blocks}
    seq = seq + 1
  end
  return seq
end
