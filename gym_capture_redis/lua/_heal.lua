-- In place of _each.lua: puts steps back that this server, or the one before it, acknowledged and may have lost.
-- scripts.py puts a line in front that defines KIND, how a trace of the step begins (n: r: x: f: p:), and NAMED,
-- number of the argument that names its call, or for p: its part.
-- KEYS, ARGV: as for _each.lua, but of each entry three more arguments come before its own:
--   own number of the step, 0 if it is not known; incarnation of the attempt; incarnation for a new rollout
-- Reply    what the step answers: OK (it is back), SAME (it was not lost), MISSING (what it builds on must be put
--          back first), CONFLICT; or LOST (it cannot be put back in its place, or the attempt is not here any more:
--          the rollout is now incomplete) | RETIRED (nothing changed)
-- Repeat   safe
-- A number that was acknowledged is claimed: until its step is back, it is a hole that shows. An attempt that this
-- server does not know is never begun again: it may have been deleted, and its id is to be another attempt's.

local own -- number that the step at hand is to have; nil: the next one
local take_next = next_step

next_step = function(state)
  if not own then return take_next(state) end
  local trace = 'o:' .. own
  state.seq = math.max(state.seq, own)
  own = nil
  return trace
end

local function is_own(trace)
  local field, names = read_trace(trace)
  -- A part that was there already, by another step, is put back without its name.
  if KIND == 'p:' then return field == 'p:' and (names == arg(NAMED) or names == '') end
  return field == KIND .. arg(NAMED)
end

local function lost(call)
  local state = load_state()
  mark_failure(state, call, 'lost')
  return reply('LOST', state)
end

local function put_back(number, incarnation, new_incarnation)
  local state, err = load_state()
  if err then return err end
  if state and state.status == 'retired' then return reply('RETIRED', state) end
  if not state or state.incarnation ~= incarnation then
    return mark_lost_rollout(state, new_incarnation)
  end
  if state.status == 'open' and number > tonumber(state.seq) then
    state.seq = number
    write(state)
  end
  local call = KIND == 'p:' and '' or arg(NAMED)
  local trace = number > 0 and redis.call('HGET', key, string.format('o:%d', number))
  local there = trace and is_own(trace)
  -- Another content for the same call may have come since, and only the step itself can tell.
  if there and KIND ~= 'r:' and KIND ~= 'x:' then return reply('SAME', state) end

  own = number > 0 and not trace and string.format('%d', number) or nil
  local answer
  if KIND == 'n:' and redis.call('HEXISTS', key, 'c:' .. call) == 1 then
    answer = reply('SAME', state) -- also of a frozen rollout
  else
    answer = step()
  end
  local code = answer[1]
  if code == 'SAME' and own and state.status == 'open' then
    -- Put back in another way. The number is taken all the same, or it would be missing.
    write(state, next_step(state), '0:' .. KIND .. call)
  end
  own = nil
  if code == 'ERROR' or code == 'MISSING' or code == 'CONFLICT' then return answer end
  if code ~= 'OK' and code ~= 'SAME' then return lost(call) end
  -- Steps that came after the loss have taken numbers of lost ones, so that counting does not show those any more.
  local moved = trace and not there or number == 0 and code == 'OK'
  if moved and KIND ~= 'f:' then return lost(call) end
  return answer
end

local replies, at = {}, 1
for entry, rollout in ipairs(KEYS) do
  key, first, wrote = rollout, at + 3, false
  replies[entry] = put_back(tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3])
  if CONFIRMED and not wrote and replies[entry][1] ~= 'ERROR' then write_again() end
  at = at + ARGV[at] + 1
end
return replies
